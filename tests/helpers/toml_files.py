"""Train configs written for a test."""

from pathlib import Path

from titan_muon.integration.toml import Selection, load_train_config

MODEL = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'


def load(tmp_path: Path, text: str, model: str = MODEL):
    """Return config and notes of a file with this text; top-level keys must come in ``text``."""
    path = tmp_path / "x.toml"
    path.write_text(text + "\n" + model)
    return load_train_config(Selection(file=str(path)))


def table(name: str, *lines: str) -> str:
    return "\n".join([f"[{name}]", *lines])
