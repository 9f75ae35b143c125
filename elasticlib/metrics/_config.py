"""
``metrics_cfg``: where a launch, or a program, sends the metrics of its agents.

Rules of this file: a key that nothing would read is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elasticlib.errors import ConfigError
from elasticlib.metrics._streams import ConsoleMetricHandler, MetricHandler, NullMetricHandler, configure

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

    Raises `ConfigError` for any key but ``handler``, and for a handler that is not known.
    """
    if unknown := [key for key in params if key != "handler"]:
        raise ConfigError(
            f"metrics_cfg={dict(params)!r}: nothing reads the key {unknown[0]!r}; "
            "the only one is 'handler', and other handlers are set by elasticlib.metrics.configure(handler)"
        )
    if not params:
        return None
    name = params["handler"]
    if not isinstance(name, str) or name not in HANDLERS:
        raise ConfigError(
            f"metrics_cfg={dict(params)!r}: handler {name!r} is none of {', '.join(sorted(HANDLERS))}; "
            "another one is set by elasticlib.metrics.configure(handler)"
        )
    return HANDLERS[name]()


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """
    Send the metrics of this program to the handler that *cfg* names: ``{"handler": "console"}`` or ``"null"``.

    Without a configuration nothing changes, as in torch, where this does nothing at all unless a site put a module
    of its own into the package. Raises `ConfigError` for keys that nothing reads. (torch:
    ``torch.distributed.elastic.metrics.initialize_metrics``)
    """
    handler = handler_of(cfg.params) if cfg is not None else None
    if handler is not None:
        configure(handler)
