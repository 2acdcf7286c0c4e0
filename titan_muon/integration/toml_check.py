"""Values from TOML against the types of a config's fields, with one message for each fault."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from titan_muon.integration.toml_place import ConfigError, Place, toml_repr
from titan_muon.optim.options import nearest

__all__ = ["convert", "field_types", "lay_over"]

_NONE = "None"
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_TOML_WORDS: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
}


def field_types(config: Any) -> dict[str, Any]:
    """Return the annotated type of every field that a file may set, by name."""
    cls = config if isinstance(config, type) else type(config)
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def lay_over(config: Any, table: Mapping[str, Any], place: Place) -> None:
    """Set fields of a config dataclass from a table, nested configs included.

    Args:
        config: Any dataclass instance. Modified in place; its own cross-checks do not run, since a
            later layer may still change a field.
        table: Keys are field names.
        place: Where the table was written.

    Raises:
        ConfigError: An unknown key or a value of another type.
    """
    types_of = field_types(config)
    for key, value in table.items():
        if key not in types_of:
            raise place.unknown(key, value, types_of)
        current = getattr(config, key)
        setattr(config, key, _new_value(current, value, types_of[key], place, key))


def _new_value(current: Any, value: Any, hint: Any, place: Place, key: str) -> Any:
    choices = _config_choices(hint)
    if choices:
        return _chosen_config(current, value, choices, place, key)
    if dataclasses.is_dataclass(current) and not isinstance(current, type):
        if not isinstance(value, dict):
            raise place.refused(key, value, f"a table, [{place.dotted(key)}]")
        lay_over(current, value, place.child(key))
        return current
    return convert(value, hint, place, key)


def convert(value: Any, hint: Any, place: Place, key: str) -> Any:
    """Return a TOML value as its field's type wants it.

    An integer is taken for a float, an array for a tuple, and the string "None" for none where the
    field is optional (TOML has no null; the command line spells it the same way).

    Args:
        value: As tomli read it.
        hint: The field's annotation, extras included.
        place: The table, for messages.
        key: The key, for messages.

    Raises:
        ConfigError: The value is of another type or not among the allowed ones.
    """
    hint = _plain(hint)
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint, place, key)
    if origin is Literal:
        return _convert_literal(value, get_args(hint), place, key)
    if hint in _WORDS:
        return _convert_scalar(value, hint, place, key)
    if origin is list:
        if not isinstance(value, list):
            raise _wrong_type(value, hint, place, key)
        (item,) = get_args(hint)
        return [convert(v, item, place, f"{key}[{i}]") for i, v in enumerate(value)]
    if origin is tuple:
        return _convert_tuple(value, hint, place, key)
    if origin is dict or hint is dict:
        if not isinstance(value, dict):
            raise _wrong_type(value, hint, place, key)
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _new_config(value, hint, place, key)
    raise ConfigError(f"{place.at(key)} cannot be set from TOML: it holds Python objects.")


def _convert_scalar(value: Any, hint: type, place: Place, key: str) -> Any:
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise _wrong_type(value, hint, place, key)
    return hint(value)


def _convert_literal(value: Any, allowed: tuple[Any, ...], place: Place, key: str) -> Any:
    # Compared with the type: 1 is not true.
    if any(type(value) is type(item) and value == item for item in allowed):
        return value
    names = [str(item) for item in allowed]
    hint = nearest(value, names) if isinstance(value, str) else ""
    words = ", ".join(toml_repr(item) for item in allowed)
    raise place.refused(key, value, words if len(allowed) == 1 else f"one of {words}", hint)


def _convert_union(value: Any, hint: Any, place: Place, key: str) -> Any:
    arms = [arm for arm in get_args(hint) if _plain(arm) is not type(None)]
    if value == _NONE and len(arms) < len(get_args(hint)):
        return None
    if len(arms) == 1:
        return convert(value, arms[0], place, key)
    # An exact type first, so that an integer stays one in float | int.
    for arm in sorted(arms, key=lambda arm: _plain(arm) is not type(value)):
        try:
            return convert(value, arm, place, key)
        except ConfigError:
            continue
    raise _wrong_type(value, hint, place, key)


def _convert_tuple(value: Any, hint: Any, place: Place, key: str) -> tuple[Any, ...]:
    items = get_args(hint)
    if not isinstance(value, list | tuple):
        raise _wrong_type(value, hint, place, key)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(value) != len(items):
        raise _wrong_type(value, hint, place, key)
    return tuple(
        convert(v, item, place, f"{key}[{i}]")
        for i, (v, item) in enumerate(zip(value, items, strict=True))
    )


def _new_config(value: Any, cls: type, place: Place, key: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong_type(value, cls, place, key)
    types_of = field_types(cls)
    inner = place.child(key)
    for name, item in value.items():
        if name not in types_of:
            raise inner.unknown(name, item, types_of)
    values = {name: convert(item, types_of[name], inner, name) for name, item in value.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{inner.at()}: {error}") from None


def _config_choices(hint: Any) -> dict[str, Any]:
    """Return the config classes of a union that names each of its arms, else nothing.

    torchtitan names them for the command line, as in ``activation-checkpoint:full``.
    """
    if get_origin(hint) not in (Union, types.UnionType):
        return {}
    choices: dict[str, Any] = {}
    for arm in get_args(hint):
        names = [getattr(extra, "name", None) for extra in getattr(arm, "__metadata__", ())]
        cls = _plain(arm)
        if not (cls is type(None) or dataclasses.is_dataclass(cls)) or not any(names):
            return {}
        choices[next(name for name in names if name)] = cls
    return choices


def _chosen_config(
    current: Any, value: Any, choices: Mapping[str, Any], place: Place, key: str
) -> Any:
    """Return the config that ``mode`` picks, with the other keys of the table laid over it."""
    inner = place.child(key)
    if not isinstance(value, dict):
        raise place.refused(key, value, f"a table, [{inner.table}], with mode = one of its kinds")
    table = dict(value)
    if "mode" in table:
        mode = table.pop("mode")
        spelled = mode.lower().replace("_", "-") if isinstance(mode, str) else mode
        spelled = _convert_literal(spelled, tuple(choices), inner, "mode")
        if type(current) is not choices[spelled]:
            current = choices[spelled]()
    else:
        spelled = next(name for name, cls in choices.items() if type(current) is cls)
    own = {} if current is None else field_types(current)
    others: set[str] = set()
    for cls in choices.values():
        others |= set() if cls is type(None) else set(field_types(cls))
    for name, item in table.items():
        if name in own:
            continue
        if name not in others:
            raise inner.unknown(name, item, {"mode", *others})
        place.notes.append(f"{inner.at(name)} has no effect with mode = {toml_repr(spelled)}.")
    if current is not None:
        lay_over(current, {k: v for k, v in table.items() if k in own}, inner)
    return current


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _wrong_type(value: Any, hint: Any, place: Place, key: str) -> ConfigError:
    got = _TOML_WORDS.get(type(value), "a date or time")
    if isinstance(value, list) and get_origin(_plain(hint)) is tuple:
        got = f"an array of {len(value)}"
    return place.refused(key, value, _in_words(hint), f", not {got}.")


def _in_words(hint: Any) -> str:
    hint = _plain(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(arm) for arm in args if _plain(arm) is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(toml_repr(item) for item in args)
    if origin is list:
        return f"an array of {_plural(args[0])}"
    if origin is tuple and Ellipsis not in args:
        return f"an array of {len(args)}: {', '.join(_in_words(arg) for arg in args)}"
    return _WORDS.get(hint, "a table")


def _plural(hint: Any) -> str:
    words = {bool: "booleans", int: "integers", float: "numbers", str: "strings"}
    return words.get(_plain(hint), f"items, each {_in_words(hint)}")
