"""Exceptions of ranks that no code can handle: pytest warns of them, or fails the test."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

CODE = """
import os, sys, threading
import pytest

on_ranks = pytest.mark.elastic

def raises():
    raise ValueError("in a thread")

def in_thread(function):
    thread = threading.Thread(target=function, name="feeder")
    thread.start()
    thread.join()

@on_ranks
def test_thread(rank):
    if rank == 1:
        in_thread(raises)

@on_ranks
def test_threads_of_all_ranks(): in_thread(raises)

@on_ranks
def test_thread_that_exits(): in_thread(sys.exit)

class Resource:
    def __repr__(self): raise TypeError("has no text")
    def __del__(self): raise ValueError("in a finalizer")

@on_ranks
def test_finalizer(): Resource()

def test_call(elastic): elastic(in_thread, raises)

@on_ranks
def test_leak(rank): os.environ["LEFT"] = "1"
"""


def test_unhandled_exceptions_of_any_rank_are_warnings(run: Run) -> None:
    result = run(CODE)

    result.assert_outcomes(passed=6, warnings=5)
    result.stdout.fnmatch_lines(
        [
            "*PytestUnhandledThreadExceptionWarning: rank 1: Exception in thread feeder",
            "*ValueError: in a thread",
            "*PytestUnhandledThreadExceptionWarning: ranks 0-1: Exception in thread feeder",
            "*PytestUnraisableExceptionWarning: ranks 0-1: Exception ignored in: *",
            "*ValueError: in a finalizer",
            "*PytestUnhandledThreadExceptionWarning: ranks 0-1: Exception in thread feeder",
        ]
    )


def test_filters_turn_unhandled_exceptions_and_leaks_into_failures(run: Run) -> None:
    result = run(CODE, "-W", "error")

    result.assert_outcomes(passed=1, failed=5)
    result.stdout.fnmatch_lines(
        [
            "PytestUnhandledThreadExceptionWarning: rank 1: Exception in thread feeder",
            "DirtyWorkerWarning: *LEFT = '1'*",
            "FAILED *test_thread - *",
        ]
    )
    # Only the test's own lines are shown, and none of the plugin's.
    result.stdout.no_fnmatch_line("*pytest_plugin*")


def test_plugins_of_pytest_that_are_off_warn_of_nothing(run: Run) -> None:
    result = run(CODE, "-p", "no:threadexception", "-p", "no:unraisableexception")

    result.assert_outcomes(passed=6, warnings=1)
