"""
Metrics, their handlers, and decorators that measure functions.

Each group of metrics may have a handler; another one gets the metrics of all other groups.

Rules of this file: the table of handlers belongs to the program, as in torch; any thread may read
and write it. An exception of a handler reaches the code that measured; agents keep it from their
loop (`records.fan_out`). Unused keys of ``metrics_cfg`` give a warning and no error, because torch
accepts them. A decorated function behaves as before. Exceptions other than `Exception` (an
interrupt, an exit) count as neither success nor failure, as in torch.
"""

from __future__ import annotations

import abc
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, ParamSpec, TypeVar, overload

from typing_extensions import deprecated

from elasticlib._clock import monotonic
from elasticlib.errors import ConfigError

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]
"""Names that torch's module has too."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("elasticlib")

AGENTS = "torchelastic"
"""Group of the agents' metrics, and of metrics without a group."""
MEASURED_BY_PROF = "__measured_by_prof__"
"""Attribute of functions that `prof` has made: an agent does not measure such a hook again."""


class MetricData(NamedTuple):
    """Value of a metric. (torch: ``torch.distributed.elastic.metrics.MetricData``)"""

    timestamp: float
    """Unix time in seconds."""
    group_name: str
    name: str
    value: float


class MetricHandler(abc.ABC):
    """Receiver of metrics. (torch: ``torch.distributed.elastic.metrics.MetricHandler``)"""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Handle one value; several threads may call it."""


class ConsoleMetricHandler(MetricHandler):
    """
    Handler that prints values.

    (torch: ``torch.distributed.elastic.metrics.ConsoleMetricHandler``)
    """

    def emit(self, metric_data: MetricData) -> None:
        """Print ``[time][group]: name=value`` to stdout."""
        print(f"[{metric_data.timestamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}")


class NullMetricHandler(MetricHandler):
    """
    Handler that drops values.

    (torch: ``torch.distributed.elastic.metrics.NullMetricHandler``)
    """

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class MetricStream:
    """Group of metrics with its handler. (torch: ``...metrics.api.MetricStream``)"""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Pass a value, with the current time, to the handler."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_handlers: dict[str | None, MetricHandler] = {None: NullMetricHandler()}
"""Handlers by group; None stands for all groups that have no handler of their own."""


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """
    Send this program's metrics of *group* to *handler* from now on; None: those of all other groups.

    Raises `ConfigError` for a handler without ``emit``. (torch: ``torch.distributed.elastic.metrics.configure``)
    """
    if not callable(getattr(handler, "emit", None)):
        raise ConfigError(f"handler={handler!r} has no method emit(metric_data): give a MetricHandler")
    _handlers[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802 - torch's name
    """Return the stream of *group* to its current handler. (torch: ``...metrics.getStream``)"""
    return MetricStream(group, _handlers.get(group, _handlers[None]))


def put_metric(metric_name: str, metric_value: float, metric_group: str = AGENTS) -> None:
    """
    Pass one value to the handler of its group.

    (torch: ``torch.distributed.elastic.metrics.put_metric``)
    """
    getStream(metric_group).add_value(metric_name, metric_value)


@deprecated("publish_metric is deprecated: use put_metric(name, value, group)", category=FutureWarning)
def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Call `put_metric` with the group first; deprecated. (torch: ``...metrics.publish_metric``)"""
    getStream(metric_group).add_value(metric_name, metric_value)


HANDLERS: dict[str, Callable[[], MetricHandler]] = {"console": ConsoleMetricHandler, "null": NullMetricHandler}
"""Handlers that ``metrics_cfg={"handler": ...}`` can name."""


class MetricsConfig:
    """Parameters of the metrics, in a dictionary `params`. (torch: ``...metrics.MetricsConfig``)"""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


def handler_of(params: Mapping[str, str]) -> MetricHandler | None:
    """
    Return the handler that *params* name, which replaces the program's; None if they name none.

    Keys other than ``handler``, and an unknown handler, only give a warning.
    """
    name = params.get("handler")
    is_known = isinstance(name, str) and name in HANDLERS
    troubles = [f"the key {key!r} is unknown" for key in params if key != "handler"]
    if "handler" in params and not is_known:
        troubles.append(f"handler {name!r} is unknown: give one of {', '.join(sorted(HANDLERS))}")
    # torch accepts any dictionary, and so does this: a key without effect must not end a launch.
    if troubles:
        _log.warning(
            "metrics_cfg=%r: %s; the only key is 'handler'; set a handler of your own with "
            "elasticlib.metrics.configure(handler)",
            dict(params),
            ", ".join(troubles),
        )

    return HANDLERS[str(name)]() if is_known else None


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """
    Send the metrics of this program to the handler that *cfg* names: ``{"handler": "console"}`` or ``"null"``.

    Without a configuration nothing changes. (torch's function does nothing unless a site has added
    its own module to the package.) Unused keys give a warning. (torch:
    ``torch.distributed.elastic.metrics.initialize_metrics``)
    """
    handler = handler_of(cfg.params) if cfg is not None else None
    if handler is not None:
        configure(handler)


@overload
def prof(fn: Callable[P, T], group: str = AGENTS) -> Callable[P, T]: ...


@overload
def prof(fn: None = None, group: str = AGENTS) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def prof(
    fn: Callable[P, T] | None = None, group: str = AGENTS
) -> Callable[P, T] | Callable[[Callable[P, T]], Callable[P, T]]:
    """
    Decorate a function, with or without parentheses, so that each call puts two metrics into *group*.

    They are ``<name>.success`` or ``<name>.failure``, which is 1, and ``<name>.duration.ms``, in
    whole milliseconds. The name is ``Class.method``, or ``module.function`` with the last part of
    the module's name. (torch: ``torch.distributed.elastic.metrics.prof``)
    """

    def measured(function: Callable[P, T]) -> Callable[P, T]:
        return _measured(function, _name(function), group)

    return measured if fn is None else measured(fn)


@deprecated("profile is deprecated: use prof(group=...)", category=FutureWarning)
def profile(group: str | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate like `prof`, with the bare name; deprecated. (torch: ``...metrics.profile``)"""

    def measured(function: Callable[P, T]) -> Callable[P, T]:
        return _measured(function, function.__name__, AGENTS if group is None else group)

    return measured


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """
    Return the whole milliseconds since *start_time_in_seconds*, a ``time.time()``.

    (torch: ``...get_elapsed_time_ms``)
    """
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

    setattr(wrapper, MEASURED_BY_PROF, True)
    return wrapper


def _name(function: Callable[..., object]) -> str:
    name = function.__qualname__
    if "." in name or not function.__module__:
        return name
    return f"{function.__module__.rpartition('.')[2]}.{name}"
