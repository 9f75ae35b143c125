"""
Hypothesis tests on ranks: the engine draws in pytest's process, and all ranks run each example.

Rules of this file: Hypothesis is not imported here. Its private names are used only if they exist.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from elasticlib.testing.ranks._rank_call import MADE

_ACTIVE = "_get_active_fixturedef"


@contextlib.contextmanager
def on_ranks(engine: Any, run: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> Iterator[None]:
    """Let the *engine* of a test call *run* with each example's arguments within the block."""
    inner = engine.inner_test

    def each_example(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        run(args, kwargs)

    each_example.__name__ = inner.__name__
    engine.inner_test = each_example
    try:
        yield
    finally:
        engine.inner_test = inner


def allow_made(item: Any) -> None:
    """
    Exempt fixtures that each rank makes from Hypothesis's check of function-scoped fixtures.

    The ranks make them again for each example. *item* is a marked test that is about to run. The
    exemption holds until `stop_allowing`.
    """
    request = getattr(item, "_request", None)
    if getattr(item.obj, "hypothesis", None) is None or not hasattr(request, _ACTIVE):
        return
    former = getattr(request, _ACTIVE)

    def active(name: str) -> Any:
        return SimpleNamespace(scope="session") if name in MADE else former(name)

    setattr(request, _ACTIVE, active)


def stop_allowing(item: Any) -> None:
    """End the exemption of `allow_made`."""
    if _ACTIVE in vars(getattr(item, "_request", None)):
        delattr(item._request, _ACTIVE)


def _context() -> Any:
    control: Any = sys.modules.get("hypothesis.control")
    current = getattr(control, "_current_build_context", None)
    return getattr(current, "value", None)


def example() -> bool | None:
    """Return whether the running example is the one that is reported; None if none runs."""
    context = _context()
    return None if context is None else bool(getattr(context, "is_final", False))


def leave_out(seconds: float) -> None:
    """Exclude *seconds* from the time of the running example, for Hypothesis's deadline."""
    times = getattr(getattr(_context(), "data", None), "draw_times", None)
    if isinstance(times, dict):
        name = "elasticlib: starting ranks"
        times[name] = times.get(name, 0.0) + seconds
