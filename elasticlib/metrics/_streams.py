"""
Measured values and where they go: a handler for each group of metrics, and one for all other groups.

Rules of this file: the table of handlers is the program's own, as in torch; it may be read and written from any
thread. A handler that raises raises into the code that measured; agents keep it from their loop (`records.fan_out`).
"""

from __future__ import annotations

import abc
import time
from typing import NamedTuple

from typing_extensions import deprecated

from elasticlib.errors import ConfigError

AGENTS = "torchelastic"
"""The group of what agents measure, and of all that names no group."""


class MetricData(NamedTuple):
    """One measured value. (torch: ``torch.distributed.elastic.metrics.MetricData``)"""

    timestamp: float
    """Unix seconds"""
    group_name: str
    name: str
    value: float


class MetricHandler(abc.ABC):
    """Takes measured values somewhere. (torch: ``torch.distributed.elastic.metrics.MetricHandler``)"""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one value; may be called from several threads."""


class ConsoleMetricHandler(MetricHandler):
    """Prints each value. (torch: ``torch.distributed.elastic.metrics.ConsoleMetricHandler``)"""

    def emit(self, metric_data: MetricData) -> None:
        """Print ``[time][group]: name=value`` to stdout."""
        print(f"[{metric_data.timestamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}")


class NullMetricHandler(MetricHandler):
    """Drops each value. (torch: ``torch.distributed.elastic.metrics.NullMetricHandler``)"""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class MetricStream:
    """The values of one group, on their way to a handler. (torch: ``...metrics.api.MetricStream``)"""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Hand a value, measured now, to the handler."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_handlers: dict[str | None, MetricHandler] = {None: NullMetricHandler()}
"""By group; None stands for all groups that have none of their own."""


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """
    Send the values of *group* to *handler*, from now on and in this program; None: those of all other groups.

    Raises `ConfigError` for a handler without ``emit``. (torch: ``torch.distributed.elastic.metrics.configure``)
    """
    if not callable(getattr(handler, "emit", None)):
        raise ConfigError(f"handler={handler!r} has no method emit(metric_data): give a MetricHandler")
    _handlers[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802 - torch's name
    """The stream of *group* to the handler that it has now. (torch: ``...metrics.getStream``)"""
    return MetricStream(group, _handlers.get(group, _handlers[None]))


def put_metric(metric_name: str, metric_value: float, metric_group: str = AGENTS) -> None:
    """Hand one value to the handler of its group. (torch: ``torch.distributed.elastic.metrics.put_metric``)"""
    getStream(metric_group).add_value(metric_name, metric_value)


@deprecated("publish_metric is deprecated: use put_metric(name, value, group)", category=FutureWarning)
def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """As `put_metric`, with the group first; deprecated. (torch: ``...metrics.publish_metric``)"""
    getStream(metric_group).add_value(metric_name, metric_value)
