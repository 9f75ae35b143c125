"""
Errors for values that cannot be sent to the ranks of a test.

Rules of this file: the error names the value, and is raised before the ranks get the test.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticlib.errors import ElasticError, PicklingError
from elasticlib.testing.ranks._rank_call import RankCall
from elasticlib.workers.child import Pickler


class CannotTravelError(ElasticError, TypeError):
    """Error for a value that a test needs and that cannot be sent to its ranks."""


def why_not(value: Any) -> str:
    """Return the reason why *value* cannot be sent; empty if it can be."""
    try:
        Pickler(io.BytesIO()).dump(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _advice(value: object) -> str:
    """Return what the user can do instead of sending *value*."""
    kind = type(value)
    if getattr(value, "__module__", kind.__module__).startswith("_pytest.") or kind.__module__.startswith("_pytest."):
        return "it exists only in pytest's process: use it in a fixture, which returns the data that the test needs"
    if kind.__module__.startswith("hypothesis."):
        return "Hypothesis draws values in pytest's process: pass the strategies to @given"
    return "create it in the test's function, or let the fixture return the data to create it from"


def refusal(
    call: RankCall, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: PicklingError
) -> CannotTravelError:
    """Return the error for a call that cannot be pickled; it names the argument at fault."""
    parts = {f"fixture or argument {name!r}": value for name, value in kwargs.items()}
    parts |= {f"argument {index}": value for index, value in enumerate(args)}
    for what, value in parts.items():
        if problem := why_not(value):
            return CannotTravelError(
                f"{what} of {call.test}, a {type(value).__qualname__}, cannot be sent to the ranks: "
                f"{problem}; {_advice(value)}"
            )

    name = getattr(function, "__qualname__", repr(function))
    return CannotTravelError(f"{name} of {call.test} cannot be sent to the ranks: {error}")
