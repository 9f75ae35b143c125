"""Processes as far as it goes without one: what is made of what the foreman tells, and how a stop is hurried."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticlib import records
from elasticlib.errors import ConfigError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.multiprocessing import MultiprocessContext, Std, _call, _context
from elasticlib.multiprocessing._processes import Processes
from elasticlib.workers._process import Event, Exit, Lost, Stopped


class Told:
    """Stands in for a crew: tells *events*, and takes down how it is asked to stop."""

    def __init__(self, *events: Event) -> None:
        self.events = list(events)
        self.stops: list[tuple[int, float]] = []
        self.closed = 0
        self.ready = os.eventfd(1, os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self.ready

    def started(self) -> bool:
        return True

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def stop(self, signum: int, grace: float) -> bool:
        self.stops.append((signum, grace))
        return True

    def close(self) -> None:
        self.closed += 1


def ended(rank: int, exitcode: int = 0, *, told: bool = False) -> Exit:
    return Exit(rank, 100 + rank, exitcode, told, None, "", "")


@pytest.fixture
def said() -> list[records.Record]:
    return []


@pytest.fixture
def make(said: list[records.Record]) -> Iterator[Callable[..., tuple[Processes, Told]]]:
    crews: list[Told] = []

    def new(*events: Event) -> tuple[Processes, Told]:
        job = _call.of_program("true", {0: (), 1: ()}, _call.Wishes("t", None, None, None))
        processes, crew = Processes(job, 2, said.append), Told(*events)
        processes._crew = crew  # type: ignore[assignment]
        processes.pids = {0: 100, 1: 101}
        crews.append(crew)
        return processes, crew

    yield new
    for crew in crews:
        os.close(crew.ready)


Make = Callable[..., tuple[Processes, Told]]


def test_all_have_succeeded_only_when_nothing_of_them_is_left(make: Make) -> None:
    processes, crew = make(ended(0), ended(1))
    processes.take()
    before = processes.all_succeeded()

    crew.events = [Stopped()]
    processes.take()

    assert (before, processes.all_succeeded()) == (False, True)


@pytest.mark.parametrize("last", [Stopped(), Lost("killed from outside")])
def test_a_set_is_gone_when_all_ended_or_were_lost(make: Make, last: Event) -> None:
    processes, _ = make(last)
    before = processes.gone()

    processes.take()

    assert (before, processes.gone()) == (False, True)


def test_survivors_are_said_in_a_record(make: Make, said: list[records.Record]) -> None:
    processes, _ = make(Stopped([100]))

    processes.take()

    assert said == [records.WorkersSurvived((100,))]


def test_who_was_stopped_by_us_is_no_failure_but_cut_short(make: Make) -> None:
    processes, _ = make(ended(0, -signal.SIGTERM, told=True), ended(1), Stopped())
    processes.take()

    assert processes.failures() == {}
    (failure,) = processes.cut_short().values()
    assert (failure.local_rank, failure.exitcode, failure.pid) == (0, -signal.SIGTERM, 100)
    assert "SIGTERM" in failure.message and "stopped by its launcher" in failure.hint


def test_who_was_not_seen_to_end_is_cut_short(make: Make) -> None:
    processes, _ = make(ended(1), Stopped([100]))
    processes.take()

    assert {rank: each.pid for rank, each in processes.cut_short().items()} == {0: 100}


def test_a_loss_is_the_failure_of_all_unless_it_is_nobodys(make: Make) -> None:
    processes, _ = make(Lost("killed from outside"))
    processes.take()

    assert {rank: each.pid for rank, each in processes.failures(4).items()} == {4: 100, 5: 101}
    assert processes.failures(by_loss=False) == {}


def test_a_stop_asks_once_and_ends_when_all_are_gone(make: Make) -> None:
    processes, crew = make()

    def tell() -> None:
        crew.events.append(Stopped())

    processes.stop(signal.SIGTERM, 30.0, tell)

    assert crew.stops == [(signal.SIGTERM, 30.0)]


def test_a_stop_of_what_is_gone_asks_nobody(make: Make) -> None:
    processes, crew = make(ended(0), ended(1), Stopped())

    processes.stop(signal.SIGTERM, 30.0)

    assert crew.stops == []


def test_a_stop_is_hastened_and_never_slowed_down(make: Make) -> None:
    processes, crew = make()

    def hurry() -> None:
        for grace in (60.0, 1.0, 5.0, 0.0):
            processes.hasten(signal.SIGKILL, grace)
        crew.events.append(Stopped())

    processes.stop(signal.SIGTERM, 30.0, hurry)

    assert [grace for _, grace in crew.stops] == [30.0, 1.0, 0.0]


def test_a_loss_lets_go_of_the_foreman(make: Make) -> None:
    processes, crew = make(Lost("killed from outside"))

    processes.stop(signal.SIGTERM, 30.0)

    assert crew.closed == 1
    assert processes.fileno() == -1


# A context on top of them.


def context_on(crew: Any, specs: DefaultLogsSpecs | None = None) -> MultiprocessContext:
    context = MultiprocessContext(
        "t", print, {0: (), 1: ()}, {0: {}, 1: {}}, "forkserver", specs or DefaultLogsSpecs(os.devnull)
    )
    context._processes._crew = crew
    context._started = True
    return context


def test_temporary_logs_stay_until_the_close_after_a_success(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = context_on(make(ended(0), ended(1), Stopped())[1], DefaultLogsSpecs(redirects=Std.OUT))

    result = context.wait()
    assert result is not None
    before = [os.path.isfile(path) for path in result.stdouts.values()]
    context.close()
    context.close()

    assert before == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_temporary_logs_stay_where_nobody_heard_of_a_success(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failed = context_on(make(ended(0), ended(1, 3), Stopped())[1], DefaultLogsSpecs())
    unheard = context_on(make(ended(0), ended(1), Stopped())[1], DefaultLogsSpecs())

    failed.wait()
    for context in (failed, unheard):
        context.close()

    assert all(os.path.isdir(os.path.dirname(path)) for path in failed.error_files.values())
    assert all(os.path.isdir(os.path.dirname(path)) for path in unheard.error_files.values())


def test_a_success_leaves_the_logs_of_another_set_with_the_same_specification(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    specs = DefaultLogsSpecs()
    well, other = (context_on(make(ended(0), ended(1), Stopped())[1], specs) for _ in range(2))

    well.wait()
    well.close()

    assert not any(os.path.isdir(os.path.dirname(path)) for path in well.error_files.values())
    assert all(os.path.isdir(os.path.dirname(path)) for path in other.error_files.values())


def test_a_failure_stops_the_others_once_and_is_told_when_they_are_gone(make: Make) -> None:
    _, crew = make(ended(1, 3))
    context = context_on(crew)
    before = [context.wait(0), context.wait(0)]

    crew.events = [ended(0, -signal.SIGTERM, told=True), Stopped()]
    result = context.wait()

    assert before == [None, None]
    assert crew.stops == [(signal.SIGTERM, 30.0)]
    assert result is not None and list(result.failures) == [1]
    assert crew.closed == 1


@pytest.mark.parametrize("timeout", [math.inf, 1e10, 1e300, sys.maxsize])
def test_a_wait_may_be_as_long_as_one_likes(make: Make, timeout: float) -> None:
    _, crew = make()
    context = context_on(crew)
    looks = iter([[], [ended(0), ended(1), Stopped()]])
    crew.take = lambda: next(looks)  # type: ignore[method-assign]

    result = context.wait(timeout)

    assert result is not None and not result.is_failed()


@pytest.mark.parametrize("timeout", [math.inf, 1e10])
def test_a_wait_for_another_thread_may_be_as_long_as_one_likes(make: Make, timeout: float) -> None:
    context = context_on(make(ended(0), ended(1), Stopped())[1])
    context._lock.acquire()
    results: list[Any] = []
    waits = threading.Thread(target=lambda: results.append(context.wait(timeout)))

    waits.start()
    context._lock.release()
    waits.join()

    assert [result.is_failed() for result in results] == [False]


@pytest.mark.parametrize("timeout", [None, "5", [1]])
def test_a_wait_for_what_is_no_number_is_refused(make: Make, timeout: Any) -> None:
    context = context_on(make()[1])

    with pytest.raises(TypeError, match=r"timeout=.* must be a number of seconds") as caught:
        context.wait(timeout)

    assert isinstance(caught.value, ConfigError)


def test_a_wait_for_a_time_that_is_none_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="timeout=nan"):
        context_on(make()[1]).wait(math.nan)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"death_sig": "TERM"}, "death_sig='TERM' must be a signal"),
        ({"death_sig": True}, "death_sig=True must be a signal"),
        ({"death_sig": 1000}, "death_sig=1000 must be a signal"),
        ({"death_sig": signal.SIGTERM, "timeout": "x"}, "timeout='x' must be a number"),
        ({"timeout": None}, "timeout=None must be a number"),
        ({"timeout": math.nan}, "timeout=nan"),
    ],
)
def test_a_close_that_cannot_work_is_refused_before_it_touches_anything(
    make: Make, call: dict[str, Any], words: str
) -> None:
    _, crew = make()
    context = context_on(crew)

    with pytest.raises(ConfigError, match=words):
        context.close(**call)

    assert (crew.stops, crew.closed, context.wait(0)) == ([], 0, None)


def test_a_close_takes_a_plain_number_of_a_signal(make: Make) -> None:
    _, crew = make()
    context = context_on(crew)
    stop = crew.stop

    def stopping(signum: int, grace: float) -> bool:
        crew.events.append(Stopped())
        return stop(signum, grace)

    crew.stop = stopping  # type: ignore[method-assign]

    context.close(10, math.inf)  # type: ignore[arg-type]

    assert crew.stops == [(10, math.inf)]


def test_a_close_that_was_cut_off_ends_waits_all_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error within it: workers are killed, but nobody heard of their ends."""
    _, crew = make()
    context = context_on(crew)
    monkeypatch.setattr(crew, "stop", lambda signum, grace: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        context.close()
    result = context.wait()

    assert result is not None and list(result.failures) == [0, 1]
    assert context not in _context._running
