"""
``metrics_cfg``: where a launch, or a program, sends the metrics of its agents.

Rules of this file: what nothing reads is named in a warning, for torch takes it, and reads nothing of it at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from elasticlib.metrics._streams import ConsoleMetricHandler, MetricHandler, NullMetricHandler, configure

_log = logging.getLogger("elasticlib")

HANDLERS: dict[str, Callable[[], MetricHandler]] = {"console": ConsoleMetricHandler, "null": NullMetricHandler}
"""What ``metrics_cfg={"handler": ...}`` may name."""


class MetricsConfig:
    """Parameters of the metrics, as a dictionary `params`. (torch: ``...metrics.MetricsConfig``)"""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


def handler_of(params: Mapping[str, str]) -> MetricHandler | None:
    """
    The handler that *params* ask for, which takes the place of the program's; None when they say nothing.

    Keys other than ``handler``, and a handler that is not known, have no effect but a warning.
    """
    troubles = [f"the key {key!r} is unknown" for key in params if key != "handler"]
    name = params.get("handler")
    known = isinstance(name, str) and name in HANDLERS
    if "handler" in params and not known:
        troubles.append(f"handler {name!r} is none of {', '.join(sorted(HANDLERS))}")
    if troubles:
        _log.warning(
            "metrics_cfg=%r: %s; the only key is 'handler', and other handlers are set by "
            "elasticlib.metrics.configure(handler)",
            *(dict(params), ", ".join(troubles)),
        )
    return HANDLERS[str(name)]() if known else None


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """
    Send the metrics of this program to the handler that *cfg* names: ``{"handler": "console"}`` or ``"null"``.

    Without a configuration nothing changes, as in torch, where this does nothing at all unless a site put a module
    of its own into the package. Keys that nothing reads are named in a warning. (torch:
    ``torch.distributed.elastic.metrics.initialize_metrics``)
    """
    handler = handler_of(cfg.params) if cfg is not None else None
    if handler is not None:
        configure(handler)
