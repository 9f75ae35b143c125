"""
Torch modes that a fixture or conftest sets in pytest's process, and that ranks copy for the test.

Rules of this file: torch is used only if a program has loaded it. Modes that its version lacks are
left out. The same list serves to find what a test has changed in its rank.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import frozen


@frozen
class Mode:
    """Functions that read and set one mode."""

    ask: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _set_deterministic(torch: Any, value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_cudnn(torch: Any, value: tuple[bool, bool, bool]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = value


MODES: dict[str, Mode] = {
    "torch's default dtype": Mode(lambda t: t.get_default_dtype(), lambda t, value: t.set_default_dtype(value)),
    "torch's default device": Mode(lambda t: t.get_default_device().type, lambda t, value: t.set_default_device(value)),
    "torch's gradient mode": Mode(lambda t: t.is_grad_enabled(), lambda t, value: t.set_grad_enabled(value)),
    "torch's deterministic algorithms": Mode(
        lambda t: (t.are_deterministic_algorithms_enabled(), t.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "torch's matmul precision": Mode(
        lambda t: t.get_float32_matmul_precision(), lambda t, value: t.set_float32_matmul_precision(value)
    ),
    "torch's anomaly mode": Mode(lambda t: t.is_anomaly_enabled(), lambda t, value: t.set_anomaly_enabled(value)),
    "torch.backends.cudnn": Mode(
        lambda t: (t.backends.cudnn.enabled, t.backends.cudnn.benchmark, t.backends.cudnn.deterministic), _set_cudnn
    ),
}


def now() -> dict[str, Any]:
    """Return the current value of each mode; {} if torch is not loaded."""
    torch = sys.modules.get("torch")
    found: dict[str, Any] = {}
    for name, mode in MODES.items() if torch is not None else ():
        # Another version lacks the name.
        with contextlib.suppress(AttributeError, TypeError, RuntimeError):
            found[name] = mode.ask(torch)
    return found


@contextlib.contextmanager
def as_there(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Set the *wanted* modes within the block; restore those that the block has not changed."""
    torch = sys.modules.get("torch")
    before = now()
    changed = {name for name, value in wanted.items() if name in before and before[name] != value}
    for name in changed:
        MODES[name].set(torch, wanted[name])
    try:
        yield
    finally:
        after = now()
        for name in changed:
            # Otherwise the test itself has changed the mode, which is reported.
            if after.get(name) == wanted[name]:
                MODES[name].set(torch, before[name])
