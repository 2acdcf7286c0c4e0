"""Where a value of a config was written, and the errors that say so."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_muon.optim.options import nearest

__all__ = ["ConfigError", "Place", "toml_repr"]


class ConfigError(ValueError):
    """A mistake in a train config, a recipe or a flag; the message is all the user needs."""


@dataclass(frozen=True)
class Place:
    """Where a table of a config was written, for messages.

    Args:
        file: Path as the user gave it, or ``"command line"``.
        table: Dotted name; empty for the top level of the file.
        moved: Dotted names that were translated from an older style, with the old spelling.
        notes: Sentences for the log; shared by all places of one file.
    """

    file: str
    table: str = ""
    moved: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def child(self, name: str) -> "Place":
        """Return the place of a table inside this one."""
        return dataclasses.replace(self, table=self.dotted(name))

    def dotted(self, key: str) -> str:
        """Return the full dotted name of a key of this table."""
        return f"{self.table}.{key}" if self.table else key

    def at(self, key: str = "") -> str:
        """Return the start of a message about a key, or about the table itself."""
        where = f"{self.file}: [{self.table}] {key}" if self.table else f"{self.file}: {key}"
        old = self.moved.get(self.dotted(key))
        return f"{where} (written as {old})" if old else where.rstrip()

    def unknown(self, key: str, value: Any, known: Iterable[str], kind: str = "key") -> ConfigError:
        """Return the error for a name that this table does not have."""
        names = sorted(known)
        if isinstance(value, dict):
            spelled = f"{self.file}: [{self.dotted(key)}]"
            kind = "table" if kind == "key" else kind
        else:
            spelled = self.at(key)
        belongs = f"of [{self.table}]" if self.table else "of a train config"
        hint = nearest(key, names) or "."
        return ConfigError(f"{spelled} is not a {kind} {belongs}{hint} Known: {', '.join(names)}.")

    def refused(self, key: str, value: Any, allowed: str, hint: str = "") -> ConfigError:
        """Return the error for a value that its key does not allow."""
        return ConfigError(f"{self.at(key)} = {toml_repr(value)} must be {allowed}{hint or '.'}")


def toml_repr(value: Any) -> str:
    """Spell a value as TOML does, shortened where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
