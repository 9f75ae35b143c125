"""
Functions that measure themselves: how often they end well or badly, and how long they take.

Rules of this file: a decorated function behaves as before, whatever its metrics do on their way; what is no
`Exception` (an interrupt, an exit) counts as neither success nor failure, as in torch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

from typing_extensions import deprecated

from elasticlib._clock import monotonic
from elasticlib.metrics._streams import AGENTS, put_metric

P = ParamSpec("P")
T = TypeVar("T")

MEASURED = "__measured_by_prof__"
"""Attribute of functions that `prof` made: an agent does not measure such a hook once more."""


@overload
def prof(fn: Callable[P, T], group: str = AGENTS) -> Callable[P, T]: ...


@overload
def prof(fn: None = None, group: str = AGENTS) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def prof(
    fn: Callable[P, T] | None = None, group: str = AGENTS
) -> Callable[P, T] | Callable[[Callable[P, T]], Callable[P, T]]:
    """
    Decorate a function, with or without parentheses, so that each call puts two metrics into *group*.

    They are ``<name>.success`` or ``<name>.failure``, which is 1, and ``<name>.duration.ms``, in whole milliseconds;
    the name is ``Class.method``, or ``module.function`` with the last part of the module's name. (torch:
    ``torch.distributed.elastic.metrics.prof``)
    """

    def measured(function: Callable[P, T]) -> Callable[P, T]:
        return _measured(function, _name(function), group)

    return measured if fn is None else measured(fn)


@deprecated("profile is deprecated: use prof(group=...)", category=FutureWarning)
def profile(group: str | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As `prof`, with the function's bare name; deprecated. (torch: ``...metrics.profile``)"""

    def measured(function: Callable[P, T]) -> Callable[P, T]:
        return _measured(function, function.__name__, AGENTS if group is None else group)

    return measured


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Whole milliseconds since *start_time_in_seconds*, a ``time.time()``. (torch: ``...get_elapsed_time_ms``)"""
    return int((time.time() - start_time_in_seconds) * 1000)


def _measured(function: Callable[P, T], name: str, group: str) -> Callable[P, T]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        begun = monotonic()
        try:
            result = function(*args, **kwargs)
        except Exception:
            put_metric(f"{name}.failure", 1, group)
            raise
        else:
            put_metric(f"{name}.success", 1, group)
            return result
        finally:
            put_metric(f"{name}.duration.ms", int((monotonic() - begun) * 1000), group)

    setattr(wrapper, MEASURED, True)
    return wrapper


def _name(function: Callable[..., object]) -> str:
    name = function.__qualname__
    if "." in name or not function.__module__:
        return name
    return f"{function.__module__.rpartition('.')[2]}.{name}"
