"""
Checks of an agent's arguments, and warnings for subclasses that were written for torch's loop.

Rules of this file: nothing is started, made or changed here. An error names the argument, its value
and the rule.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

from elasticlib.errors import ConfigError
from elasticlib.rendezvous import ETCD_BACKENDS, Rendezvous
from elasticlib.spec import WorkerSpec

_log = logging.getLogger("elasticlib")

HOOKS = ("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown")
"""Methods of a subclass that this loop calls."""
_UNCALLED = (
    "_invoke_run",
    "_rendezvous",
    "_assign_worker_ranks",
    "_initialize_workers",
    "_restart_workers",
    "_exit_barrier",
)
"""Methods that subclasses of torch's agents override, and that this loop does not call."""


def as_seconds(value: object) -> float | None:
    """Return *value* as a number of seconds, which may be negative; None if it is not a number."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(seconds) else seconds


def check_health_check_server(value: object) -> None:
    """Raise `ConfigError` unless *value* is None or has ``stop``, the only method called."""
    if value is not None and not callable(getattr(value, "stop", None)):
        raise ConfigError(
            f"health_check_server={value!r} has no stop() method: give the result of create_healthcheck_server"
        )


def check_local(log_line_prefix_template: object, uninterruptible_state_timeout: object) -> None:
    """Raise `ConfigError` for an invalid argument that only a `LocalElasticAgent` has."""
    template, asleep = log_line_prefix_template, uninterruptible_state_timeout
    if template is not None and not isinstance(template, str):
        raise ConfigError.of_setting(
            "log_line_prefix_template", f"{template!r} must be a string, such as '[${{role_name}}${{rank}}]:'"
        )
    if asleep is not None and as_seconds(asleep) is None:
        raise ConfigError(f"uninterruptible_state_timeout={asleep!r} must be a number of seconds, or 0 for no check")


def warn_of_uncalled_methods(cls: type, agent: type) -> None:
    """Warn, at the class statement of *cls*, of torch's methods that *agent* never calls."""
    bases = [base for base in cls.__bases__ if issubclass(base, agent)]
    added = [name for name in _UNCALLED if hasattr(cls, name) and not any(hasattr(base, name) for base in bases)]
    if added:
        warnings.warn(
            f"{cls.__qualname__} has {' and '.join(added)}, which torch's agents call and this agent never calls: "
            f"override {', '.join(HOOKS)} instead",
            UserWarning,
            stacklevel=4,  # past `__init_subclass__` and `abc.ABCMeta`, to the class statement
        )


def master_of(spec: WorkerSpec, addr: str, port: int) -> tuple[str, int]:
    """
    Return the master address and port for workers of a round whose store is at *addr* and *port*.

    torch's agent uses those of the specification. On etcd they work, because rank 0 hosts the
    store and may do so anywhere. Elsewhere the agent hosts the store: other values are ignored
    with a warning, because no store would be there.
    """
    wanted = spec.master_addr or addr, spec.master_port or port
    if wanted == (addr, port) or _is_on_etcd(spec.rdzv_handler):
        return wanted
    _log.warning(
        "master_addr=%r, master_port=%r have no effect: the store of this round is at %s, port %s; "
        "leave them out of the WorkerSpec",
        *(spec.master_addr, spec.master_port, addr, port),
    )
    return addr, port


def _is_on_etcd(handler: Any) -> bool:
    return (handler.backend if isinstance(handler, Rendezvous) else handler.get_backend()) in ETCD_BACKENDS
