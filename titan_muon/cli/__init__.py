"""The ``titan-muon`` command: what a run would do, and what may be written into its config."""
