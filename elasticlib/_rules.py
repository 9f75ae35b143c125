"""
Rules for the values of a specification: a message names the value, the rule and the fix.

Rules of this file: a validator has the signature of attrs, a converter takes a value, and a
`check_...` serves functions that get the value as an argument. Nothing is changed or started.
"""

from __future__ import annotations

import logging
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

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
    if _is_time(value):
        return
    raise ConfigError.of_setting(
        "shutdown_timeout", f"{value!r} must be a number of seconds, 0 (SIGKILL at once) or more"
    )


def _is_time(value: object) -> bool:
    """Return True for finite seconds from 0 on."""
    return _is_number(value) and 0 <= value < math.inf


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return True for Python's own numbers, but not for True and False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_logs_specs(value: object) -> None:
    """Raise `ConfigError` unless *value* can make the logs of a round."""
    if not callable(getattr(value, "reify", None)):
        raise ConfigError.of_setting(
            "logs_specs", f"{value!r} must be a LogsSpecs, such as DefaultLogsSpecs(redirects=Std.ALL)"
        )


def one_of(known: Sequence[str]) -> Validator:
    """Return the check for one of the *known* words."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value not in known:
            raise ConfigError.of_setting(attribute.name, f"{value!r} is unknown: give one of {', '.join(known)}")

    return check


def whole(least: float) -> Validator:
    """Return the check for a whole number of at least *least*, as `number` makes it of its like."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        is_in_range = isinstance(value, int) and value >= least
        if not is_in_range:
            raise SpecError.of_setting(attribute.name, f"{value!r} must be a whole number of at least {least}")

    return check


def exit_timeout(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Check for finite seconds from 0 on, or None."""
    if value is None or _is_time(value):
        return
    raise ConfigError.of_setting(
        attribute.name, f"{value!r} must be a number of seconds, 0 (stop at once) or more, or None"
    )


def number(value: Any) -> Any:
    """Return a whole number of any kind, such as numpy's, as an int; anything else as it is."""
    try:
        return int(operator.index(value))
    except TypeError:
        return value


def truth(value: Any) -> Any:
    """Return True or False for *value*; return text as it is, which might say either."""
    if isinstance(value, str):
        return value
    return bool(value)


def real(value: Any) -> Any:
    """Return a number of any kind, such as numpy's, as Python's own; anything else as it is."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, numbers.Real):
        return float(value)
    return value


class Default(str):
    """The text of a field that was not given, where that is to be told from the same text given."""


def text_of(value: Any) -> Any:
    """Return None as no text; anything else as it is."""
    return "" if value is None else value


def positive(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Check for a finite number above 0."""
    is_positive = _is_number(value) and 0 < value < math.inf
    if not is_positive:
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
    """Return True where UTF-8 can hold *value*: an argument may be any bytes."""
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
    """Check like the others, but never show the value: it must not end up in a log."""
    if value is None:
        return
    is_usable = isinstance(value, str) and value and "\0" not in value
    if not is_usable:
        raise ConfigError(f"{attribute.name} must be text of at least one character, without NUL; None for no token")


def texts_or_none(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Check for a list of texts that UTF-8 can hold, or None."""
    if value is None:
        return
    if not isinstance(value, list) or not _are_texts(value):
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


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(each, str) for each in values)


def arguments(name: str, value: Any) -> tuple[Any, ...]:
    """Return any iterable as arguments; of text each character is one, which is warned of."""
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
    """Return a list of our own of any iterable; text, which would become letters, as it is."""
    is_text = isinstance(value, (str, bytes))
    if is_text or not isinstance(value, Iterable):
        return value
    return list(value)


def words(value: Sequence[str] | str) -> tuple[str, ...]:
    """Return the names of modules in a list, or in text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not _are_texts(parts):
        raise ConfigError.of_setting(
            "preload", f"{value!r} must be the names of modules, as a list or as text with commas"
        )
    stripped = (part.strip() for part in parts)
    found = tuple(part for part in stripped if part)
    if "learn" in found:
        raise ConfigError.of_setting(
            "preload", f"{','.join(found)!r}: nothing is learned any more: use 'auto', or name the modules"
        )
    has_others = len(found) > 1
    if "auto" in found and has_others:
        raise ConfigError.of_setting(
            "preload", f"{','.join(found)!r}: 'auto' stands alone: name torch and the other modules instead"
        )
    return found


def devices(value: Any) -> tuple[int | str, ...] | None:
    """Return GPUs by index or name, from a sequence, text with commas, or an index; None as it is."""
    if value is None:
        return None
    found = _split_devices(value)
    if found is None or not all(map(_is_device, found)):
        raise ConfigError(
            f"devices={value!r} must be indices from 0 on, or names, of GPUs, such as [0, 1]; () is none at all"
        )
    return tuple(found)


def _split_devices(value: Any) -> list[Any] | None:
    """Return the devices in *value*, not checked yet; None where it cannot hold any."""
    if isinstance(value, str):
        return [_device(each) for each in value.split(",")] if value.strip() else []
    if is_index(value):
        return [_device(value)]
    if isinstance(value, Iterable):
        return [_device(each) for each in value]
    return None


def _is_device(value: Any) -> bool:
    """Return True for an index, or for a name that the workers' environment can hold."""
    if isinstance(value, str):
        return value != "" and is_unicode(value)
    return is_index(value)


def ranks(value: Any) -> Any:
    """Return ``all`` or None as it is; ranks from 0 on, or a single one, as a tuple."""
    if value is None or value == "all":
        return value
    found = [number(each) for each in value] if isinstance(value, Iterable) else [number(value)]
    is_text = isinstance(value, (str, bytes))  # bytes would be numbers
    if is_text or not all(map(is_index, found)):
        raise ConfigError(f"show={value!r} must be 'all', or ranks from 0 on, such as [0, 1]; () for none")
    return tuple(found)


def _device(value: Any) -> Any:
    """Return an index as an int, also where text writes it; a name as it is."""
    if not isinstance(value, str):
        return number(value)
    text = value.strip()
    return int(text) if text.isdecimal() else text


def is_index(value: object) -> bool:
    """Return True for a whole number from 0 on; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def dictionary(value: Any) -> dict[str, Any]:
    """Return a dictionary of our own with the caller's items."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{value!r} for rdzv_configs, metrics_cfg or kwargs must be a dictionary; leave it out for none"
        )
    return dict(value)
