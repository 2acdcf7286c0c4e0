"""Writing TOML: what a train config may hold, tables under their own headings."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["to_toml"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a table as TOML text that reads back as equal.

    Args:
        table: Strings, numbers, booleans, lists and tables of them, as tomli returns them. Not
            modified.

    Raises:
        TypeError: A value of another type, such as a date.
    """
    return "\n".join(_lines(table, ())).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not _has_heading(value)}
    if path and (plain or not table):
        yield f"[{'.'.join(map(_key, path))}]"
    yield from (f"{_key(key)} = {_value(value)}" for key, value in plain.items())
    if plain or (path and not table):
        yield ""
    for key, value in table.items():
        inside = (*path, key)
        if isinstance(value, Mapping):
            yield from _lines(value, inside)
        elif _has_heading(value):
            for item in value:
                yield f"[[{'.'.join(map(_key, inside))}]]"
                yield from (f"{_key(name)} = {_value(entry)}" for name, entry in item.items())
                yield ""


def _has_heading(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # Patterns are easier to read, and to correct, without doubled backslashes.
        literal = "\\" in value and "'" not in value and value.isprintable()
        return f"'{value}'" if literal else _quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())} }}"
    raise TypeError(f"cannot write a {type(value).__name__} as TOML: {value!r}")


def _quoted(text: str) -> str:
    # TOML's escapes are JSON's, but for DEL, which JSON lets stand.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
