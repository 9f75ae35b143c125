"""
Conversion of torch's ``LaunchConfig`` into elasticlib's.

Rules of this file: torch's class is recognized by its name and its fields, without an import of
torch. Values are taken unchanged. A field that elasticlib does not have causes a warning.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from attrs import fields

from elasticlib.errors import ConfigError
from elasticlib.spec import LaunchConfig

_log = logging.getLogger("elasticlib")
_OF_TORCH = frozenset(each.name for each in fields(LaunchConfig) if not each.kw_only)
"""Fields that torch's ``LaunchConfig`` has too."""


def as_launch_config(value: object) -> LaunchConfig:
    """
    Return *value* if it is a `LaunchConfig`, or a new one with the fields of torch's ``LaunchConfig``.

    Raises `ConfigError` for anything else, and for a value that breaks a rule. A warning names each
    unknown field whose value is not its default. *value* is not changed.
    """
    if isinstance(value, LaunchConfig):
        return value

    settings = {}
    for each in dataclasses.fields(_torchs_kind(value)):
        setting = getattr(value, each.name)
        if each.name in _OF_TORCH:
            settings[each.name] = setting
        elif not _is_default(each, setting):
            _log.warning("%s=%r has no effect: elasticlib's LaunchConfig has no such field", each.name, setting)

    return LaunchConfig(**settings)


def _torchs_kind(value: object) -> Any:
    """Return the dataclass named ``LaunchConfig`` among the classes of *value*. Raises `ConfigError`."""
    # A program may have derived a class with another name from torch's.
    kinds = [each for each in type(value).__mro__ if each.__name__ == "LaunchConfig"]
    kind = next(filter(dataclasses.is_dataclass, kinds), None)
    if kind is None:
        raise ConfigError(
            f"config{_shown(value, like_it=bool(kinds))} is not a LaunchConfig: give one, such as "
            "elasticlib.LaunchConfig(nproc_per_node=2)"
        )
    return kind


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _shown(value: object, *, like_it: bool) -> str:
    # An object other than a plain value may hold a token, which must not end up in a log.
    if isinstance(value, (str, int, float, type, type(None))):
        return f"={value!r}"
    return f", a {type(value).__qualname__}{' that is not a dataclass' if like_it else ''},"
