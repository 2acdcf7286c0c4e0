"""One of torchtitan's configs as a config of this package's subclass."""

from dataclasses import fields
from typing import Any, TypeVar

__all__ = ["as_class"]

Config = TypeVar("Config", bound=Any)


def as_class(config: Config, stock: type[Any], ours: type[Config]) -> Config:
    """Return a config of torchtitan's own class as one of ours, with the same values.

    Args:
        config: Not modified; any other class than ``stock`` was chosen on purpose, and comes back
            as it is.
        stock: torchtitan's class.
        ours: Its subclass.
    """
    if type(config) is not stock:
        return config
    return ours(**{field.name: getattr(config, field.name) for field in fields(config)})
