"""
Tests of Hypothesis on ranks: its engine draws in pytest's process, and each example runs on all ranks.

Rules of this file: Hypothesis is not imported here; what it has no public name for is asked for, and left where it is
not there.
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
    """Within the block the *engine* of a test calls *run* with the arguments of each example."""
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
    Have the health check of function-scoped fixtures pass those that each rank makes for each example anew.

    *item* is a marked test of Hypothesis that is about to be called; until `stop_allowing`.
    """
    request = getattr(item, "_request", None)
    if getattr(item.obj, "hypothesis", None) is None or not hasattr(request, _ACTIVE):
        return
    former = getattr(request, _ACTIVE)

    def active(name: str) -> Any:
        return SimpleNamespace(scope="session") if name in MADE else former(name)

    setattr(request, _ACTIVE, active)


def stop_allowing(item: Any) -> None:
    """End what `allow_made` began."""
    if _ACTIVE in vars(getattr(item, "_request", None)):
        delattr(item._request, _ACTIVE)


def _context() -> Any:
    control: Any = sys.modules.get("hypothesis.control")
    current = getattr(control, "_current_build_context", None)
    return getattr(current, "value", None)


def example() -> bool | None:
    """Of the example that runs at the moment: whether it is the one that is told of; None where none runs."""
    context = _context()
    return None if context is None else bool(getattr(context, "is_final", False))


def leave_out(seconds: float) -> None:
    """Take *seconds* off the time of the example that runs at the moment, for its deadline."""
    times = getattr(getattr(_context(), "data", None), "draw_times", None)
    if isinstance(times, dict):
        name = "elasticlib: starting ranks"
        times[name] = times.get(name, 0.0) + seconds
