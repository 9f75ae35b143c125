"""Options for binding workers to CPUs, and their checks. PURE."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elasticlib.errors import ConfigError


class BindingError(ConfigError, RuntimeError):
    """Raised when workers cannot be bound to CPUs on this machine as asked; a RuntimeError, as torch's."""


class AffinityMode(str, enum.Enum):
    """
    Choice of CPUs for a worker; *its GPU* is the one whose index is the worker's local rank.

    (torch: ``torch.numa.binding.AffinityMode``)
    """

    NODE = "node"
    """All CPUs of the NUMA node of its GPU."""
    SOCKET = "socket"
    """All CPUs of the processor package of this node."""
    EXCLUSIVE = "exclusive"
    """An equal share of the node's CPUs, in whole cores, for each GPU of the node."""
    CORE_COMPLEX = "core-complex"
    """The CPUs of one shared cache of the node; its GPUs get the caches in turn."""


@dataclass(frozen=True)
class NumaOptions:
    """
    Options for binding workers to CPUs. (torch: ``torch.numa.binding.NumaOptions``)

    A mode may be given by its name, such as ``"node"``. Raises `ConfigError` (a ``ValueError``) for any other.
    """

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False
    """True if workers start unbound, with a logged warning, when the binding is not possible."""

    def __post_init__(self) -> None:
        try:
            mode = AffinityMode(self.affinity_mode)
        except ValueError:
            known = ", ".join(each.value for each in AffinityMode)
            raise ConfigError(f"affinity_mode={self.affinity_mode!r} is unknown: give one of {known}") from None
        object.__setattr__(self, "affinity_mode", mode)
        object.__setattr__(self, "should_fall_back_if_binding_fails", bool(self.should_fall_back_if_binding_fails))


def as_numa_options(value: object) -> NumaOptions | None:
    """
    Return *value* as `NumaOptions`, or None for None; it may be a similar object, such as torch's.

    Raises `ConfigError` for anything else.
    """
    if value is None or isinstance(value, NumaOptions):
        return value

    if not hasattr(value, "affinity_mode"):
        raise ConfigError.of_setting(
            "numa_options",
            f"{value!r} must be a NumaOptions, such as NumaOptions(AffinityMode.NODE); None for no binding",
        )

    # torch's own options hold a member of torch's enumeration.
    mode = getattr(value.affinity_mode, "value", value.affinity_mode)
    return NumaOptions(mode, getattr(value, "should_fall_back_if_binding_fails", False))
