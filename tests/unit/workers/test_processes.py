"""Processes as far as it goes without one: what is made of what the spawner tells, and how a stop is hurried."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from elasticlib import records
from elasticlib.errors import ConfigError, PicklingError, root_cause
from elasticlib.helpers import Helper
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.processes._lease import Lease
from elasticlib.spec import WorkerSpec
from elasticlib.workers import MultiprocessContext, Std, _context, _processes
from elasticlib.workers._launch_events import (
    AllStopped,
    Event,
    Exit,
    LastWorkerRuns,
    RoundStoreEnded,
    SpawnerLost,
    Stuck,
)
from elasticlib.workers._processes import Processes
from elasticlib.workers.child._report import Report


class ScriptedSpawner:
    """Stands in for a spawner: returns *events*, and records its orders to stop."""

    def __init__(self, *events: Event) -> None:
        self.events = list(events)
        self.stops: list[tuple[int, float]] = []
        self.started = True
        self.closed = 0
        self.killed = False
        self.ready = os.eventfd(1, os.EFD_CLOEXEC)

    def helpers(self) -> list[Helper]:
        return []

    def replace(self, helper: Helper, why: str) -> None:
        raise AssertionError("no helper stands still here")

    def ask_for_place(self) -> None:
        raise AssertionError("nothing is started again here")

    def helpers_of_others(self) -> list[Helper]:
        return []

    def fileno(self) -> int:
        return self.ready

    def drain(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def stop(self, signum: int, grace: float, spare_failed: bool = False) -> bool:
        self.stops.append((signum, grace))
        return True

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed += 1


class NeverLooks:
    """Stands in for the watch over helpers, which wants to look now and then."""

    def due_in(self) -> None:
        return None

    def tend(self, *given: object) -> float:
        return math.inf


def ended(rank: int, exitcode: int = 0, *, was_stopped: bool = False) -> Exit:
    return Exit(rank, 100 + rank, exitcode, was_stopped, None, "", "")


WELL = (ended(0), ended(1), AllStopped())


@pytest.fixture
def reported() -> list[records.Record]:
    return []


@pytest.fixture
def make(reported: list[records.Record]) -> Iterator[Callable[..., tuple[Processes, ScriptedSpawner]]]:
    spawners: list[ScriptedSpawner] = []

    def new(*events: Event) -> tuple[Processes, ScriptedSpawner]:
        job = _context.plan_of_program("true", {0: (), 1: ()}, functools.partial(WorkerSpec, "t", 2, None))
        processes, spawner = Processes(job, 2, reported.append), ScriptedSpawner(*events)
        processes._supervisor.client = spawner  # type: ignore[assignment]
        processes._supervisor._helpers = NeverLooks()  # type: ignore[assignment]
        processes.round.pids = {0: 100, 1: 101}
        spawners.append(spawner)
        return processes, spawner

    yield new
    for spawner in spawners:
        os.close(spawner.ready)


Make = Callable[..., tuple[Processes, ScriptedSpawner]]


def test_all_have_succeeded_only_when_nothing_of_them_is_left(make: Make) -> None:
    processes, spawner = make(ended(0), ended(1))
    processes.poll()
    before = processes.round.all_succeeded()

    spawner.events = [AllStopped()]
    processes.poll()

    assert (before, processes.round.all_succeeded()) == (False, True)


@pytest.mark.parametrize("last", [AllStopped(), SpawnerLost("killed from outside")])
def test_set_has_ended_when_all_workers_ended_or_were_lost(make: Make, last: Event) -> None:
    processes, _ = make(last)
    before = processes.round.gone()

    processes.poll()

    assert (before, processes.round.gone()) == (False, True)


def test_survivors_are_reported_in_a_record(make: Make, reported: list[records.Record]) -> None:
    processes, _ = make(AllStopped([100]))

    processes.poll()

    assert reported == [records.WorkersSurvived((100,))]


def test_worker_stopped_by_us_counts_as_cut_short_not_as_failure(make: Make) -> None:
    processes, _ = make(ended(0, -signal.SIGTERM, was_stopped=True), ended(1), AllStopped())
    processes.poll()

    assert processes.round.failures() == {}
    (failure,) = processes.round.cut_short().values()
    assert (failure.local_rank, failure.exitcode, failure.pid) == (0, -signal.SIGTERM, 100)
    assert "SIGTERM" in failure.message and "stopped by its launcher" in failure.hint


def test_worker_not_seen_to_end_counts_as_cut_short(make: Make) -> None:
    processes, _ = make(ended(1), AllStopped([100]))
    processes.poll()

    assert {rank: each.pid for rank, each in processes.round.cut_short().items()} == {0: 100}


def test_a_loss_is_the_failure_of_all_unless_it_is_nobodys(make: Make) -> None:
    processes, _ = make(SpawnerLost("killed from outside"))
    processes.poll()

    failures = processes.round.failures(4)
    assert {rank: (each.process, each.secondary) for rank, each in failures.items()} == {
        4: ("spawner", False),
        5: ("", True),
    }
    assert (4, failures[4]) == root_cause(failures)
    assert failures[4].message == "killed from outside"
    assert processes.round.failures(by_loss=False) == {}


def test_a_spawner_that_does_not_stop_its_workers_in_time_is_killed(
    make: Make, reported: list[records.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_processes, "_ANSWER", 0.1)
    monkeypatch.setattr(_processes, "wait_until_gone", lambda pids, limit: None)
    processes, spawner = make()
    os.eventfd_read(spawner.ready)

    processes.stop(signal.SIGTERM, 0.0)

    assert (spawner.killed, spawner.closed, processes.round.gone()) == (True, 1, True)
    assert reported == [records.SpawnerKilled(0.1)]
    assert processes.round.failures() == {}


def test_a_spawner_whose_lease_is_over_is_killed_if_its_workers_still_run(
    make: Make, reported: list[records.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have their ranks from then on, and the process that keeps the contact may be stopped."""
    monkeypatch.setattr(_processes, "wait_until_gone", lambda pids, limit: None)
    processes, spawner = make()
    processes._limits.lease = lease = Lease()
    lease.renew(time.monotonic() + 60.0)
    processes.poll()
    patience, killed = processes.poll_timeout(), spawner.killed
    lease.renew(time.monotonic() - 1.0)

    waits = processes.poll_timeout()
    processes.poll()

    assert patience is not None and 50.0 < patience <= 60.0
    assert (False, 0.0, True, True) == (killed, waits, spawner.killed, processes.round.gone())
    assert reported == [records.WorkersCutOff()]
    lease.close()


def test_a_spawner_has_as_long_as_its_workers_and_some_more(make: Make) -> None:
    processes, spawner = make()
    before = processes.poll_timeout()

    processes.ask_to_stop(signal.SIGTERM, 30.0)
    requested = processes.poll_timeout()
    processes.hasten(signal.SIGKILL, 0.0)
    hastened = processes.poll_timeout()
    spawner.events = [AllStopped()]
    processes.poll()

    assert requested is not None and hastened is not None
    assert requested > 30.0 > hastened > 0.0
    assert (before, processes.poll_timeout()) == (None, None)


STORE = RoundStoreEnded("the process that hosts the workers' store (pid 7) was ended by SIGKILL", 7, -signal.SIGKILL)


def raised(rank: int, *, secondary: bool) -> Exit:
    report = Report("error", b"", "ValueError", "ValueError: bad", "", 1.0, secondary)
    return Exit(rank, 100 + rank, 1, False, report, "")


def test_a_store_that_ended_is_a_failure_though_all_workers_run(make: Make) -> None:
    processes, _ = make(STORE)
    processes.poll()

    assert processes.round.any_failed() and not processes.round.gone()
    ((rank, failure),) = processes.round.failures(4).items()
    assert (rank, failure.message, failure.pid, failure.exitcode) == (4, STORE.why, 7, -signal.SIGKILL)
    assert failure.process == "worker store"
    assert str(processes.round.original_exception(0)) == STORE.why


@pytest.mark.parametrize("lost", [evolve(STORE, was_needed=False), SpawnerLost("killed")], ids=["store", "spawner"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_store_that_ends_after_its_workers_is_lost_by_other_nodes(lost: Event, world_size: int, make: Make) -> None:
    processes, spawner = make(*WELL)
    processes.round.world_size, processes.round.has_store = world_size, True
    processes.poll()
    before = processes.round.serves_others(), processes.round.lost_store_of_others()
    spawner.events = [lost]

    processes.poll()

    others = world_size > 2
    assert before == (others, False) and processes.round.all_succeeded()
    assert processes.round.lost_store_of_others() == others
    if others:
        ((rank, failure),) = processes.round.failures(4).items()
        assert (rank, failure.message) == (4, lost.why)


def test_ended_store_is_the_root_cause_of_lost_connections(make: Make) -> None:
    processes, _ = make(raised(0, secondary=True), raised(1, secondary=True), STORE, AllStopped())
    processes.poll()

    _, cause = root_cause(processes.round.failures())

    assert cause.message == STORE.why


def test_a_worker_that_failed_by_itself_is_not_blamed_on_the_store(make: Make) -> None:
    processes, _ = make(raised(0, secondary=False), STORE, AllStopped())
    processes.poll()

    failures = processes.round.failures()

    assert (failures[0].message, failures[1].message) == ("ValueError: bad", STORE.why)


def test_unreadable_result_of_a_worker_raises_instead_of_being_none(make: Make) -> None:
    processes, _ = make(Exit(0, 100, 0, False, None, "", unread=True), ended(1), AllStopped())
    processes.poll()

    with pytest.raises(PicklingError, match=r"rank 0 .*reached its limit of open files.*ulimit -n"):
        processes.round.return_values()


@pytest.mark.parametrize(
    ("ended_well", "spare_failed", "is_requested"),
    [(False, False, True), (True, False, False), (True, True, True)],
    ids=["workers run", "all gone", "for a restart, detached processes may be left"],
)
def test_a_stop_asks_once_where_something_may_be_left(
    make: Make, ended_well: bool, spare_failed: bool, is_requested: bool
) -> None:
    processes, spawner = make(*(WELL if ended_well else ()))

    processes.stop(signal.SIGTERM, 30.0, lambda _: spawner.events.append(AllStopped()), spare_failed=spare_failed)

    assert spawner.stops == [(signal.SIGTERM, 30.0)] * is_requested
    assert processes.round.gone()


def test_a_stop_is_hastened_and_never_slowed_down(make: Make) -> None:
    processes, spawner = make()

    def hurry(limit: float | None) -> None:
        for grace in (60.0, 1.0, 5.0, 0.0):
            processes.hasten(signal.SIGKILL, grace)
        spawner.events.append(AllStopped())

    processes.stop(signal.SIGTERM, 30.0, hurry)

    assert [grace for _, grace in spawner.stops] == [30.0, 1.0, 0.0]


def test_a_stop_that_spares_who_failed_is_hastened_for_them_too(make: Make) -> None:
    """Their time goes on after the others' grace: another signal must still reach them."""
    processes, spawner = make()

    def hurry(limit: float | None) -> None:
        processes._limits._kill_at = 0.0  # the others' time is over
        processes.hasten(signal.SIGKILL, 0.0)
        spawner.events.append(AllStopped())

    processes.stop(signal.SIGTERM, 1.0, hurry, spare_failed=True)

    assert [(signal.SIGTERM, 1.0), (signal.SIGKILL, 0.0)] == spawner.stops


@pytest.mark.parametrize("somebody_waits", [True, False])
def test_awaited_stop_is_reported_once_with_the_remaining_workers(
    make: Make, reported: list[records.Record], monkeypatch: pytest.MonkeyPatch, somebody_waits: bool
) -> None:
    monkeypatch.setattr(_processes, "_AT_ONCE", 0.0)
    processes, spawner = make(ended(0))
    processes.round.rank_base = 4
    limits: list[float | None] = []

    def listen(limit: float | None) -> None:
        limits.append(limit)
        if len(limits) == 3:
            spawner.events.append(AllStopped())

    processes.stop(signal.SIGINT, 30.0, listen, somebody_waits=somebody_waits)

    assert all(limit is not None and limit <= 30.0 + _processes._ANSWER for limit in limits)
    assert (limits[0] == 0.0) == somebody_waits
    awaited = [(record.pids, record.signum) for record in reported if isinstance(record, records.StopAwaited)]
    assert awaited == [({5: 101}, signal.SIGINT)] * somebody_waits


def test_worker_killed_in_native_code_is_named_by_its_global_rank(make: Make, reported: list[records.Record]) -> None:
    processes, spawner = make()
    processes.round.rank_base = 4

    def find(limit: float | None) -> None:
        spawner.events += [Stuck(1, 101, 2.25), AllStopped()]

    processes.stop(signal.SIGINT, 30.0, find)

    assert [records.WorkerStuck(5, 101, signal.SIGINT, 2.25)] == reported


STACKS = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 41 in train\n'


@pytest.mark.parametrize("world_size", [2, 6])
def test_last_worker_is_reported_with_its_global_rank_and_place(
    make: Make, reported: list[records.Record], world_size: int
) -> None:
    processes, _ = make(LastWorkerRuns(1, 101, 30.0, None, STACKS))
    processes.round.rank_base, processes.round.world_size = 4, world_size

    processes.poll()

    assert [records.LastRuns(5, 101, 30.0, None, "at train.py:41", world_size == 2)] == reported


def test_a_loss_lets_go_of_the_spawner(make: Make) -> None:
    processes, spawner = make(SpawnerLost("killed from outside"))

    processes.stop(signal.SIGTERM, 30.0)

    assert spawner.closed == 1
    assert processes.fileno() == -1


# A context on top of them.


def context_on(spawner: Any, specs: DefaultLogsSpecs | None = None) -> MultiprocessContext:
    context = MultiprocessContext(
        "t", print, {0: (), 1: ()}, {0: {}, 1: {}}, "forkserver", specs or DefaultLogsSpecs(os.devnull)
    )
    context._processes._supervisor.client = spawner
    context._started = True
    return context


def test_temporary_logs_stay_until_the_close_after_a_success(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = context_on(make(*WELL)[1], DefaultLogsSpecs(redirects=Std.OUT))

    result = context.wait()
    assert result is not None
    before = [os.path.isfile(path) for path in result.stdouts.values()]
    context.close()
    context.close()

    assert before == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_temporary_logs_are_kept_unless_a_success_was_returned(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failed = context_on(make(ended(0), ended(1, 3), AllStopped())[1], DefaultLogsSpecs())
    unheard = context_on(make(*WELL)[1], DefaultLogsSpecs())

    failed.wait()
    for context in (failed, unheard):
        context.close()

    assert all(os.path.isdir(os.path.dirname(path)) for path in failed.error_files.values())
    assert all(os.path.isdir(os.path.dirname(path)) for path in unheard.error_files.values())


def test_success_leaves_logs_of_another_set_with_the_same_specs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    specs = DefaultLogsSpecs()
    well, other = (context_on(make(*WELL)[1], specs) for _ in range(2))

    well.wait()
    well.close()

    assert not any(os.path.isdir(os.path.dirname(path)) for path in well.error_files.values())
    assert all(os.path.isdir(os.path.dirname(path)) for path in other.error_files.values())


def test_failure_stops_others_once_and_is_reported_after_they_ended(make: Make) -> None:
    _, spawner = make(ended(1, 3))
    context = context_on(spawner)
    before = [context.wait(0), context.wait(0)]

    spawner.events = [ended(0, -signal.SIGTERM, was_stopped=True), AllStopped()]
    result = context.wait()

    assert before == [None, None]
    assert spawner.stops == [(signal.SIGTERM, 30.0)]
    assert result is not None and list(result.failures) == [1]
    assert spawner.closed == 1


@pytest.mark.parametrize("timeout", [math.inf, 1e10, 1e300, sys.maxsize])
def test_a_wait_may_be_as_long_as_one_likes(make: Make, timeout: float) -> None:
    _, spawner = make()
    context = context_on(spawner)
    looks = iter([[], [ended(0), ended(1), AllStopped()]])
    spawner.drain = lambda: next(looks)  # type: ignore[method-assign]

    result = context.wait(timeout)

    assert result is not None and not result.is_failed()


@pytest.mark.parametrize("timeout", [math.inf, 1e10])
def test_a_wait_for_another_thread_may_be_as_long_as_one_likes(make: Make, timeout: float) -> None:
    context = context_on(make(*WELL)[1])
    context._lock.acquire()
    results: list[Any] = []
    waits = threading.Thread(target=lambda: results.append(context.wait(timeout)))

    waits.start()
    context._lock.release()
    waits.join()

    assert [result.is_failed() for result in results] == [False]


@pytest.mark.parametrize(
    ("timeout", "kind"), [(None, TypeError), ("5", TypeError), ([1], TypeError), (math.nan, ValueError)]
)
def test_wait_with_an_invalid_timeout_is_refused(make: Make, timeout: Any, kind: type[Exception]) -> None:
    context = context_on(make()[1])

    with pytest.raises(kind, match=r"timeout=") as caught:
        context.wait(timeout)

    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("call", "message"),
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
    make: Make, call: dict[str, Any], message: str
) -> None:
    _, spawner = make()
    context = context_on(spawner)

    with pytest.raises(ConfigError, match=message):
        context.close(**call)

    assert (spawner.stops, spawner.closed, context.wait(0)) == ([], 0, None)


def test_a_close_takes_a_plain_number_of_a_signal(make: Make) -> None:
    _, spawner = make()
    context = context_on(spawner)
    stop = spawner.stop

    def stopping(signum: int, grace: float, _: bool = False) -> bool:
        spawner.events.append(AllStopped())
        return stop(signum, grace)

    spawner.stop = stopping  # type: ignore[method-assign]

    context.close(10, math.inf)  # type: ignore[arg-type]

    assert spawner.stops == [(10, math.inf)]


def test_a_close_that_was_cut_off_ends_waits_all_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error within it: workers are killed, but nobody heard of their ends."""
    _, spawner = make()
    context = context_on(spawner)
    monkeypatch.setattr(spawner, "stop", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        context.close()
    result = context.wait()

    assert result is not None and list(result.failures) == [0, 1]
    assert context not in _context._running


def test_a_worker_that_ends_at_once_has_handled_the_signal() -> None:
    """It may save and end before the launcher goes on."""

    class Client:
        started = True

        def __init__(self) -> None:
            self.signals: list[int] = []

        def pass_on(self, signum: int, ranks: list[int]) -> None:
            self.signals.append(signum)

    client = Client()
    launched: Any = SimpleNamespace(
        _supervisor=SimpleNamespace(client=client),
        _count=1,
        round=SimpleNamespace(running=lambda: {} if client.signals else {0: os.getpid()}),
    )
    former = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert Processes.pass_on(launched, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, former)
    assert [signal.SIGUSR2] == client.signals
