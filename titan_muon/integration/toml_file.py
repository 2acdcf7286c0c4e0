"""Reading a TOML file."""

from pathlib import Path
from typing import Any

from titan_muon.integration.toml_place import ConfigError
from titan_muon.optim.options import nearest

__all__ = ["read_toml", "toml_literal"]


def read_toml(file: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: The file is missing, unreadable or not valid TOML.
    """
    import tomli

    try:
        return tomli.loads(_read_text(file))
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}.") from None


def toml_literal(text: str) -> Any:
    """Return a value as TOML reads it; what it cannot read is a string."""
    import tomli

    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _read_text(file: str | Path) -> str:
    path = Path(file)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file{_nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text, which TOML must be: {error}.") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.") from None


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} in {Path.cwd()}."
    files = sorted(p.name for p in path.parent.glob("*.toml"))
    if not files:
        return f"; {path.parent.absolute()} holds no TOML file."
    return f"{nearest(path.name, files) or '.'} TOML files there: {', '.join(files)}."
