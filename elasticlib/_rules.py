"""
The rules that values of a specification keep, each said once: by the value, the rule and the mend.

Rules of this file: a validator has the signature of attrs, a converter takes a value, a `check_...` serves those who
get the value as an argument; nothing is changed or started.
"""

from __future__ import annotations

import logging
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import Attribute

from elasticlib.errors import ConfigError, SpecError

_log = logging.getLogger("elasticlib")

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise `ConfigError` unless *value* is one of the *known* words."""
    if value not in known:
        raise ConfigError.of_setting(name, f"{value!r} must be one of {', '.join(known)}")


def check_shutdown_timeout(value: object) -> None:
    """Raise `ConfigError` unless *value* is a time that workers may get."""
    if not _is_time(value):
        raise ConfigError.of_setting(
            "shutdown_timeout", f"{value!r} must be a number of seconds, 0 (SIGKILL at once) or more"
        )


def _is_time(value: object) -> bool:
    """Whether *value* is finite seconds from 0 on."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value < math.inf


def check_logs_specs(value: object) -> None:
    """Raise `ConfigError` unless *value* can make the logs of a round."""
    if not callable(getattr(value, "reify", None)):
        raise ConfigError.of_setting(
            "logs_specs", f"{value!r} must be a LogsSpecs, such as DefaultLogsSpecs(redirects=Std.ALL)"
        )


def one_of(known: Sequence[str]) -> Validator:
    """One of the *known* words."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value not in known:
            raise ConfigError.of_setting(attribute.name, f"{value!r} is unknown: give one of {', '.join(known)}")

    return check


def whole(least: float) -> Validator:
    """A whole number of at least *least*, as `number` makes it of its like."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or value < least:
            raise SpecError.of_setting(attribute.name, f"{value!r} must be a whole number of at least {least}")

    return check


def exit_timeout(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Finite seconds from 0 on, or None."""
    if value is not None and not _is_time(value):
        raise ConfigError.of_setting(
            attribute.name, f"{value!r} must be a number of seconds, 0 (stop at once) or more, or None"
        )


def number(value: Any) -> Any:
    """A whole number of any kind, such as numpy's, as an int; anything else as it is."""
    try:
        return int(operator.index(value))
    except TypeError:
        return value


def truth(value: Any) -> Any:
    """What is true or false, as that; text, which might say either, as it is."""
    return value if isinstance(value, str) else bool(value)


def real(value: Any) -> Any:
    """A number of any kind as Python's own; anything else as it is."""
    if isinstance(value, (int, float)):
        return value
    return float(value) if isinstance(value, numbers.Real) else value


class Default(str):
    """The text of a field that was not given, where that is to be told from the same text given."""


def text_of(value: Any) -> Any:
    """None as no text; anything else as it is."""
    return "" if value is None else value


def positive(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise SpecError.of_setting(attribute.name, f"{value!r} must be a finite number of seconds above 0")


def text(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Text without NUL."""
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError.of_setting(attribute.name, f"{value!r} must be text without NUL characters")


def identity(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    """Text that is a part of keys and signatures."""
    text(instance, attribute, value)
    if not is_unicode(value):
        raise ConfigError.of_setting(attribute.name, f"{value!r} must be text that can be written in UTF-8")


def is_unicode(value: str) -> bool:
    """Whether UTF-8 can hold *value*: an argument of the command line may be any bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def yes_or_no(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError.of_setting(attribute.name, f"{value!r} must be True or False")


def secret(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Like the others, but silent about the value: it must not end up in a log."""
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise ConfigError(f"{attribute.name} must be text of at least one character, without NUL; None for no token")


def texts_or_none(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """A list of texts that UTF-8 can hold, or None."""
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError.of_setting(
            attribute.name,
            f"{value!r} must be a list of texts, such as ['loss', 'error'], one of which a line must "
            "hold; None or [] for none",
        )
    for each in value:
        try:
            each.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ConfigError(f"{attribute.name}: {each!r} cannot be written in UTF-8: leave it out") from None


def arguments(name: str, value: Any) -> tuple[Any, ...]:
    """Anything that can be run through, as arguments; text too, as each of its characters, which is warned of."""
    if isinstance(value, (str, bytes)):
        _log.warning(
            "%s=%r is taken as %d arguments, one a character; a single one is written (value,)", name, value, len(value)
        )
    try:
        return tuple(value)
    except TypeError:
        raise ConfigError.of_setting(
            name, f"{value!r} must be a tuple of arguments; a single one is written (value,)"
        ) from None


def own_list(value: Any) -> Any:
    """What can be run through as a list of our own; text, of which each letter would be one, as it is."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else value


def words(value: Sequence[str] | str) -> tuple[str, ...]:
    """Names of modules, from a list or from text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ConfigError.of_setting(
            "preload", f"{value!r} must be the names of modules, as a list or as text with commas"
        )
    found = tuple(part.strip() for part in parts if part.strip())
    if "learn" in found:
        raise ConfigError.of_setting(
            "preload", f"{','.join(found)!r}: nothing is learned any more: use 'auto', or name the modules"
        )
    if "auto" in found and len(found) > 1:
        raise ConfigError.of_setting(
            "preload", f"{','.join(found)!r}: 'auto' stands alone: name torch and the other modules instead"
        )
    return found


def devices(value: Any) -> tuple[int | str, ...] | None:
    """GPUs by index or name, from a sequence, from text with commas, or a single index; None as it is."""
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else [value] if is_index(value) else value
    found: list[Any] = [_device(each) for each in parts] if isinstance(parts, Iterable) else [None]
    if isinstance(value, str) and not value.strip():
        found = []
    if not all(is_index(each) or (isinstance(each, str) and each and is_unicode(each)) for each in found):
        raise ConfigError(
            f"devices={value!r} must be indices from 0 on, or names, of GPUs, such as [0, 1]; () is none at all"
        )
    return tuple(found)


def ranks(value: Any) -> Any:
    """``all``, or ranks from 0 on: one, or a sequence; None as it is."""
    if value is None or value == "all":
        return value
    found = [number(each) for each in value] if isinstance(value, Iterable) else [number(value)]
    if isinstance(value, (str, bytes)) or not all(map(is_index, found)):
        raise ConfigError(f"show={value!r} must be 'all', or ranks from 0 on, such as [0, 1]; () for none")
    return tuple(found)


def _device(value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else value
    return int(text) if isinstance(text, str) and text.isdecimal() else number(text)


def is_index(value: object) -> bool:
    """Whether it counts from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def dictionary(value: Any) -> dict[str, Any]:
    """A mapping of the caller's as our own."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{value!r} for rdzv_configs, metrics_cfg or kwargs must be a dictionary; leave it out for none"
        )
    return dict(value)
