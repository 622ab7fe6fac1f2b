"""A configuration while it is being read: plain data, how keys were spelled, what to say."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jzero.config.values import plain
from jzero.errors import ConfigError

MISSING: Any = object()


@dataclass
class Draft:
    """Nested plain data that later passes rename, fill in and finally check.

    `spelled` maps a key's canonical path to what the user wrote for it, so that messages name that.
    """

    data: dict[str, Any]
    notices: list[str] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """The value at a dotted path, `MISSING` where there is none."""
        value: Any = self.data
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return MISSING
            value = value[name]
        return value

    def set(self, path: str, value: Any) -> None:
        """Write a value, making sections on the way; one that is no object is left to the check."""
        *parents, last = path.split(".")
        section = self.data
        for name in parents:
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
            if not isinstance(section, dict):
                return
        section[last] = value

    def pop(self, path: str) -> Any:
        """Remove a key and return its value, `MISSING` where there is none."""
        value = self.get(path)
        if value is not MISSING:
            *parents, last = path.split(".")
            section = self.data
            for name in parents:
                section = section[name]
            del section[last]
        return value

    def name(self, path: str) -> str:
        """A key's path as the user spelled it."""
        return self.spelled.get(path, path)


def copy(value: Any, path: str = "") -> Any:
    """Independent plain data from what was given; every key is text, every number finite."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                where = path or "the configuration"
                raise ConfigError(f"{where}: found the key {name!r}; keys are text")
        return {name: copy(v, f"{path}.{name}" if path else name) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy(item, f"{path}[{index}]") for index, item in enumerate(value)]
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: found {value}; allowed: a finite number")
    return value
