"""
Rules for the values of a specification: a message names the value, the rule and the fix.

Rules of this file: a validator has the signature of attrs, and a converter takes a value. A
`check_...` function is for functions that get the value as an argument. Nothing is changed or started.
"""

from __future__ import annotations

import logging
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from attrs import Attribute
from attrs.validators import and_

from elasticlib.errors import ConfigError, SpecError

_log = logging.getLogger("elasticlib")

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    _check(name, value, lambda each: each in known, f"must be one of {', '.join(known)}")


def check_shutdown_timeout(value: object) -> None:
    _check("shutdown_timeout", value, is_time, _MUST_BE_SHUTDOWN_TIMEOUT)


def check_logs_specs(value: object) -> None:
    _check("logs_specs", value, _makes_logs, _MUST_MAKE_LOGS)


def _check(
    name: str,
    value: object,
    is_valid: Callable[[Any], bool],
    demand: str,
    error: type[ConfigError] = ConfigError,
) -> None:
    """Raise *error* where *value* is not valid; the message names the setting, the value and the *demand*."""
    if not is_valid(value):
        raise error.of_setting(name, f"{value!r} {demand}")


_MUST_BE_SHUTDOWN_TIMEOUT = "must be a number of seconds, 0 (SIGKILL at once) or more"
_MUST_MAKE_LOGS = "must be a LogsSpecs, such as DefaultLogsSpecs(redirects=Std.ALL)"


def is_time(value: object) -> bool:
    """Return True for a finite number of seconds from 0 on."""
    return is_number(value) and 0 <= value < math.inf


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 < value < math.inf


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for Python's own numbers, but not for True and False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    # NUL would end the value in an environment variable or an argument of a process.
    return isinstance(value, str) and "\0" not in value


def _makes_logs(value: object) -> bool:
    return callable(getattr(value, "reify", None))


# Validators.


def _rule(is_valid: Callable[[Any], bool], demand: str, error: type[ConfigError] = ConfigError) -> Validator:
    """Return a validator of attrs that calls `_check`."""
    return lambda _, attribute, value: _check(attribute.name, value, is_valid, demand, error)


def one_of(known: Sequence[str]) -> Validator:
    return _rule(lambda value: value in known, f"is unknown: give one of {', '.join(known)}")


def whole(least: float) -> Validator:
    """Return the validator for an int of at least *least*; `number` converts other kinds before."""
    return _rule(
        lambda value: isinstance(value, int) and value >= least,
        f"must be a whole number of at least {least}",
        SpecError,
    )


def is_unicode(value: str, errors: str = "strict") -> bool:
    """Return True if UTF-8 can hold *value*. An argument of a process can be any bytes."""
    try:
        value.encode(errors=errors)
    except UnicodeEncodeError:
        return False
    return True


positive = _rule(_is_positive, "must be a finite number of seconds above 0", SpecError)
unix_time = _rule(lambda value: is_number(value) and value > 0, "must be a Unix time, or inf to ask Slurm")
notice = _rule(
    lambda value: isinstance(value, os.PathLike) or callable(value) or (_is_text(value) and value != ""),
    "must be the path of a file, or a function that returns a reason or None",
)
text = _rule(_is_text, "must be a string without NUL characters")
identity = and_(text, _rule(is_unicode, "must be a string that can be encoded in UTF-8"))
"""Validator of text that becomes part of keys and signatures."""
yes_or_no = _rule(lambda value: isinstance(value, bool), "must be True or False")
shutdown_timeout = _rule(is_time, _MUST_BE_SHUTDOWN_TIMEOUT)
exit_timeout = _rule(is_time, "must be a number of seconds, 0 (stop at once) or more, or None")
logs_specs = _rule(_makes_logs, _MUST_MAKE_LOGS)


def secret(_: Any, attribute: Attribute[Any], value: Any) -> None:
    # Unlike other messages, this one leaves the value out: it must not end up in a log.
    if not _is_text(value) or not value:
        raise ConfigError(f"{attribute.name} must be a non-empty string without NUL characters, or None for no token")


def texts(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, list) or not _are_texts(value):
        raise ConfigError.of_setting(
            attribute.name,
            f"{value!r} must be a list of strings, such as ['loss', 'error']: lines that contain one of "
            "them are copied; None or [] for no filter",
        )

    for each in value:
        # Lines are compared as bytes. Bytes that are not UTF-8 are lone surrogates in Python's text.
        if not is_unicode(each, "surrogateescape"):
            raise ConfigError(f"{attribute.name}: {each!r} cannot be encoded in UTF-8: leave it out")


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(each, str) for each in values)


# Converters.


def number(value: Any) -> Any:
    """Return a whole number of any kind, such as numpy's, as an int; anything else unchanged."""
    # numpy's integers do not derive from int, and JSON does not take them.
    try:
        return int(operator.index(value))
    except TypeError:
        return value


def truth(value: Any) -> Any:
    """Return True or False for *value*; text unchanged."""
    # Text could mean either, such as "no": the validator refuses it.
    if isinstance(value, str):
        return value
    return bool(value)


def real(value: Any) -> Any:
    """Return a number of any kind, such as numpy's, as Python's own; anything else unchanged."""
    if isinstance(value, (int, float)):
        return value
    # numpy's float32 does not derive from float, and JSON does not take it.
    if isinstance(value, numbers.Real):
        return float(value)
    return value


class Default(str):
    """Default text of a field, distinguishable by its type from the same text given by the caller."""


def text_of(value: Any) -> Any:
    """Return "" for None; anything else unchanged."""
    return "" if value is None else value


def arguments(name: str, value: Any) -> tuple[Any, ...]:
    """
    Return any iterable as a tuple of arguments. Raises `ConfigError` for other values.

    Text is an iterable too: each character becomes one argument, with a warning.
    """
    if isinstance(value, (str, bytes)):
        _log.warning(
            "%s=%r is used as %d arguments, one for each character; write (value,) for a single argument",
            name,
            value,
            len(value),
        )

    try:
        return tuple(value)
    except TypeError:
        raise ConfigError.of_setting(
            name, f"{value!r} must be a tuple of arguments; write (value,) for a single one"
        ) from None


def own_list(value: Any) -> Any:
    """Return a new list of the items of any iterable; text and other values unchanged."""
    # A list of text would hold single letters: the validator refuses text.
    is_text = isinstance(value, (str, bytes))
    return list(value) if isinstance(value, Iterable) and not is_text else value


def words(value: Sequence[str] | str) -> tuple[str, ...]:
    """
    Return the names of modules from a list, or from comma-separated text, without blank names.

    Raises `ConfigError` for other values, for ``learn``, and for ``auto`` beside other names.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not _are_texts(parts):
        raise ConfigError.of_setting(
            "preload", f"{value!r} must be module names, as a list or a comma-separated string"
        )

    found = tuple(filter(None, map(str.strip, parts)))
    if "learn" in found:
        raise ConfigError.of_setting(
            "preload", f"{','.join(found)!r} is no longer supported: use 'auto', or name the modules"
        )

    if "auto" in found and len(found) > 1:
        raise ConfigError.of_setting(
            "preload",
            f"{','.join(found)!r}: 'auto' cannot be combined with module names: name torch and the other "
            "modules instead",
        )

    return found


def devices(value: Any) -> tuple[int | str, ...]:
    """Return GPUs by index or name, from a sequence, comma-separated text, or an index."""
    found = _split_devices(value)
    if not all(map(_is_device, found)):
        raise ConfigError(
            f"devices={value!r} must be a list of GPU indices (from 0) or names, such as [0, 1]; () for no GPU"
        )
    return tuple(found)


def _split_devices(value: Any) -> list[Any]:
    if isinstance(value, str):
        # Blank text means no GPU at all.
        parts = value.split(",") if value.strip() else ()
        return list(map(_device, parts))
    if is_index(value):
        return [_device(value)]
    if isinstance(value, Iterable):
        return list(map(_device, value))
    return [value]


def _is_device(value: Any) -> bool:
    """Return True for an index, or for a name that fits into the workers' environment."""
    if isinstance(value, str):
        # The name becomes part of CUDA_VISIBLE_DEVICES.
        return value != "" and is_unicode(value)
    return is_index(value)


def ranks(value: Any) -> Any:
    """Return ``all`` unchanged; ranks from 0 on, or a single one, as a tuple. Raises `ConfigError`."""
    if value == "all":
        return value
    several = value if isinstance(value, Iterable) else (value,)
    found = tuple(map(number, several))
    # The items of bytes are numbers, but bytes are not a list of ranks.
    if isinstance(value, bytes) or not all(map(is_index, found)):
        raise ConfigError(f"show={value!r} must be 'all' or a list of ranks (from 0), such as [0, 1]; () for none")
    return found


def _device(value: Any) -> Any:
    """Return an index as an int, also from text of digits; a name unchanged."""
    if not isinstance(value, str):
        return number(value)
    text = value.strip()
    return int(text) if text.isdecimal() else text


def is_index(value: object) -> bool:
    """Return True for an int from 0 on, but not for True and False."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def dictionary(value: Any) -> dict[str, Any]:
    """Return a new dictionary with the items of the caller's mapping. Raises `ConfigError`."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"one of rdzv_configs, metrics_cfg and kwargs is {value!r}: it must be a dictionary; leave it out for none"
        )
    return dict(value)
