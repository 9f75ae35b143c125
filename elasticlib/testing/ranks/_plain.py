"""
The workers' part of tests on ranks without pytest.

Rules of this file: every change that a test makes to its worker is undone or reported. An exception
of the test is an outcome, with the traceback that Python prints.
"""

from __future__ import annotations

import importlib
import os
import traceback
import unittest
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from attrs import evolve

from elasticlib.stacks import CALLERS, users_part
from elasticlib.testing.ranks import _coverage, _isolation, _outcomes, _process_state, _recorder
from elasticlib.testing.ranks._rank_call import Failure, RankCall, RankOutcome
from elasticlib.workers.child import pack_result


class UnittestWork:
    """Functions that workers run for unittest; see `SessionWork`."""

    def __init__(self) -> None:
        self._modules: dict[str, None] = {}

    @staticmethod
    def run(
        call: RankCall, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RankOutcome:
        """Run *function* on this rank and return its outcome."""
        return watched(call, lambda: _called(call, function, args, kwargs))

    @staticmethod
    def look_at_failure() -> bool | None:
        """Return None: unittest has no debugger for failures."""
        return None

    def preparation(self, always: Sequence[ModuleType]) -> tuple[int, Callable[..., object], tuple[Any, ...]]:
        """
        Return the import of the tests' modules; see `SessionWork.preparation`.

        The import may be slow, and so must not count for a test's timeout.
        """
        self._modules |= dict.fromkeys(each.__name__ for each in always if each.__name__ != "__main__")
        return len(self._modules), _import, (tuple(self._modules),)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)


def watched(call: RankCall, outcome: Callable[[], RankOutcome]) -> RankOutcome:
    """Return the *outcome* of a call, with its leaks, number of collectives and coverage."""
    seed = call.seed + int(os.environ["RANK"])
    before = _process_state.collectives() if call.shares_group else 0
    with _isolation.isolated(seed, checks=call.checks, has_own_group=call.has_own_group) as changes:
        with _coverage.measured(call) as measured, _recorder.until(call.until):
            found = outcome()
    called = _process_state.collectives() - before if call.shares_group else 0
    return evolve(found, collectives=called, leaks=changes(), coverage=measured())


def _called(
    call: RankCall, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RankOutcome:
    try:
        value = function(*args, **kwargs)
        return RankOutcome("passed", value=pack_result(value, ()))
    except unittest.SkipTest as skip:
        return RankOutcome("skipped", reason=str(skip), place=_outcomes.place(users_part(skip), call))
    except _outcomes.PartsError as several:
        parts = tuple((what, _failure(call, error)) for what, error in several.parts)
        return RankOutcome("failed", failure=parts[0][1], parts=parts)
    except BaseException as error:
        return RankOutcome("failed", failure=_failure(call, error))


def _failure(call: RankCall, error: BaseException) -> Failure:
    error = error.with_traceback(users_part(error))
    return _outcomes.failure(call, error, "".join(traceback.format_exception(error)))


CALLERS.add(__file__)
