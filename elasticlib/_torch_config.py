"""
Torch's own configuration of a launch, taken for ours.

Rules of this file: it is known by its name and its fields, and torch is not imported for it: what it holds is taken as
it is, and what nothing here reads is warned of.
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
    *value* where it is a `LaunchConfig`, or a new one with the fields of torch's ``LaunchConfig``.

    Raises `ConfigError` for anything else, and for a value that breaks a rule. A field that is unknown here and says
    something is named in a warning. *value* is not changed.
    """
    if isinstance(value, LaunchConfig):
        return value
    kinds = [each for each in type(value).__mro__ if each.__name__ == "LaunchConfig"]
    kind = next(filter(dataclasses.is_dataclass, kinds), None)
    if kind is None:
        raise ConfigError(
            f"config{_shown(value, like_it=bool(kinds))} is no LaunchConfig: give one, such as "
            "elasticlib.LaunchConfig(nproc_per_node=2)"
        )
    given = {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
    for each in dataclasses.fields(kind):
        if each.name not in _OF_TORCH and not _is_default(each, given[each.name]):
            _log.warning(
                "%s=%r has no effect: elasticlib's LaunchConfig has no such field", each.name, given[each.name]
            )
    return LaunchConfig(**{name: each for name, each in given.items() if name in _OF_TORCH})


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _shown(value: object, *, like_it: bool) -> str:
    # Anything but a plain value may hold a token, which must not end up in a log.
    if isinstance(value, (str, int, float, type, type(None))):
        return f"={value!r}"
    return f", a {type(value).__qualname__}{' that is no dataclass' if like_it else ''},"
