"""``python -m titan_muon.cli``: the same as the ``titan-muon`` script."""

from titan_muon.cli.main import main

if __name__ == "__main__":
    main()
