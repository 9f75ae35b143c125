"""Records of events: each record's text and weight, and the sink that logs it."""

from __future__ import annotations

import logging
from typing import get_origin

import pytest

from elasticlib import records
from elasticlib.errors import ProcessFailure
from elasticlib.records import (
    AgentFailed,
    AgentSucceeded,
    DetachedEnded,
    HelperHeld,
    HelperLost,
    HelperReplaced,
    HelperWoken,
    LastRuns,
    LaunchStarted,
    LogsKept,
    NotNeeded,
    OutcomeMissed,
    PreloadAdvised,
    RanksAssigned,
    RanksAwaited,
    RanksMissed,
    RanksReceived,
    Record,
    RoundEnded,
    RoundStarted,
    RunEnded,
    SpawnerKilled,
    StateTimed,
    StepDone,
    StopAwaited,
    StopRepeated,
    StreamsKept,
    ThreadsChosen,
    WatchdogReported,
    WorkerEnded,
    WorkerPlace,
    WorkersCutOff,
    WorkersSeen,
    WorkersStopping,
    WorkersSurvived,
    WorkerStarted,
    WorkerStuck,
)

WORKER = WorkerPlace(1, 3, 3, 4, 1001)
FAILURE = ProcessFailure(1, 1001, 7, "", message="a bad value")
STARTED = RoundStarted(2, 0, 1, 4, 1, 3, "127.0.0.1:29500", {0: 12, 1: 11}, "all 1 nodes have joined")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            STARTED,
            "round 2 started (all 1 nodes have joined): node rank 0 of 1, 2 of 4 workers here, store at "
            "127.0.0.1:29500, restart 1 of 3, processes [11, 12]",
        ),
        (RoundEnded(2, "rank 1 failed", restart=True), "round 2 ended: rank 1 failed"),
        (
            WorkersStopping(2, "rank 1 failed", 15, 2.5),
            "stopping the workers of round 2 (SIGTERM, SIGKILL after 2.5 s): rank 1 failed",
        ),
        (ThreadsChosen(2, 4.5, 2), "OMP_NUM_THREADS=2 in each worker: 4.5 CPUs for 2 workers"),
        (
            StopAwaited({4: 1004}, 15, 2.04),
            "waiting for rank 4 (process 1004) to exit on SIGTERM: SIGKILL follows in 2.0 s, or at once "
            "with another Ctrl-C",
        ),
        (
            StopAwaited({rank: 1000 + rank for rank in range(10)}, 99, 29.5),
            "waiting for ranks 0-9 (processes 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007 and 2 more) "
            "to exit on signal 99: SIGKILL follows in 29.5 s, or at once with another Ctrl-C",
        ),
        (
            StopRepeated("signal 15", 12.34),
            "signal 15 came while the workers were being stopped: they still have 12.3 s to end",
        ),
        (
            WorkerStuck(3, 1001, 2, 2.04),
            "rank 3 (process 1001) is in native code, such as a collective, and has not handled SIGINT in "
            "2.0 s, nor has any other worker here: it is killed, so that workers which wait for it can exit",
        ),
        (
            LastRuns(3, 71, 30.2, None, "at train.py:41", are_all=True),
            "all ranks but 3 finished 30 s ago; rank 3 (process 71) is at train.py:41: it is left running",
        ),
        (
            LastRuns(3, 71, 30.2, 270.0, "in native code", are_all=False),
            "all ranks of this node but 3 finished 30 s ago; rank 3 (process 71) is in native code: exit_timeout ends "
            "it in 270 s",
        ),
        (
            LastRuns(3, 71, 30.2, None, "", are_all=True),
            "all ranks but 3 finished 30 s ago; rank 3 (process 71) still runs: it is left running",
        ),
        (
            DetachedEnded({71: "rsync -a out host:", 72: "sleep 60"}),
            "detached processes of workers were killed, because the job failed or restarts: "
            "process 71 (rsync -a out host:), process 72 (sleep 60)",
        ),
        (
            NotNeeded("n2/1-a", "all 2 nodes succeeded in round 0"),
            "node n2/1-a was not needed, so none of its workers has a result: all 2 nodes succeeded in round 0",
        ),
        (
            OutcomeMissed(
                "n2/1-a", "round 0 succeeded on this node, but its outcome on other nodes is unknown: refused"
            ),
            "node n2/1-a exits with success, because its own workers succeeded; the outcome of the job is "
            "unknown: round 0 succeeded on this node, but its outcome on other nodes is unknown: refused",
        ),
        (
            StreamsKept("/tmp/logs"),
            "log directory: /tmp/logs (a temporary folder that is kept; choose another by --log-dir or log_dir)",
        ),
        (LogsKept("/tmp/logs"), "logs and error files are kept in /tmp/logs"),
        (LaunchStarted("train.py", {"role": "a", "max_restarts": 3}), "launching train.py: role='a', max_restarts=3"),
        (RanksAwaited("n1/7-a"), "node n1/7-a waits for its rank assignment"),
        (
            RanksReceived(2, 1, 2, 4, 0, "n0:29500", "all 2 nodes have joined", 0.0123),
            "node rank 1 of 2 in round 2 after 0.012 s: all 2 nodes have joined",
        ),
        (RanksMissed("nobody came", 600.0), "no rank assignment after 600.000 s: nobody came"),
        (RanksAssigned(2, (2, 3), 0.5), "this node has the ranks [2, 3] in round 2 (0.500 s)"),
        (WorkerStarted(WORKER), "rank 3 started as 1001"),
        (WorkerEnded(WORKER, "TERMINATED"), "rank 3 ended as TERMINATED"),
        (WorkerEnded(WORKER, "FAILED", FAILURE), "rank 3 ended as FAILED: a bad value"),
        (WorkersSeen("HEALTHY", 2), "workers are HEALTHY, 2 restarts are left"),
        (StepDone("Agent._start_workers", 0.5, True), "Agent._start_workers took 0.500 s"),
        (StepDone("Agent._start_workers", 0.5, False), "Agent._start_workers failed after 0.500 s"),
        (StateTimed("WARM_UP", 2.0), "WARM_UP took 2.000 s"),
        (RunEnded("FAILED", 1, 3, 2.0), "the agent's run FAILED after 2.000 s, 1 of 3 restarts used"),
        (AgentSucceeded(), "the agent has finished"),
        (AgentFailed("Traceback\n  ...\nValueError: x\n"), "the agent failed: ValueError: x"),
        (WatchdogReported("watchdog started"), "watchdog started"),
        (
            PreloadAdvised(("pandas", "big.trainer"), 6.0, ("torch",)),
            "at the last restart the workers were importing pandas, big.trainer for about 6 s: "
            "--preload torch,pandas,big.trainer saves that at each restart",
        ),
        (
            WatchdogReported("timer expired", 7, "a.py#1", 1.0, 9),
            "timer expired: timer 'a.py#1' of process 7, signal 9",
        ),
    ],
)
def test_record_prints_its_facts_in_one_line(record: Record, text: str) -> None:
    assert str(record) == text


def test_survivors_are_named_with_what_it_means() -> None:
    text = str(WorkersSurvived((7, 8)))

    assert "[7, 8]" in text
    assert "uninterruptible sleep" in text


@pytest.mark.parametrize(
    ("record", "level"),
    [
        (STARTED, logging.INFO),
        (RoundEnded(0, "", restart=True), logging.WARNING),
        (RoundEnded(0, "", restart=False), logging.INFO),
        (WorkersStopping(0, "", 15, 30.0), logging.INFO),
        (SpawnerKilled(12.0), logging.ERROR),
        (HelperLost("the spawner process ended"), logging.WARNING),
        (HelperWoken("the spawner process (pid 7)", 6.0), logging.WARNING),
        (HelperHeld("the spawner process (pid 7)", 6.0), logging.WARNING),
        (HelperReplaced("the spawner process (pid 7) did not answer for 30 s and was killed"), logging.ERROR),
        (WorkersCutOff(), logging.ERROR),
        (WorkersSurvived((7,)), logging.ERROR),
        (ThreadsChosen(1, 1.0, 1), logging.INFO),
        (LogsKept(""), logging.INFO),
        (StreamsKept(""), logging.WARNING),
        (RanksMissed("nobody came", 1.0), logging.DEBUG),
        (WorkersSeen("HEALTHY", 2), records.FINE),
        (WatchdogReported("watchdog started"), logging.INFO),
        (WatchdogReported("timer expired", 7), logging.WARNING),
    ],
    ids=str,
)
def test_records_that_cost_time_or_need_a_look_have_a_higher_level(record: Record, level: int) -> None:
    assert record.level == level


def test_the_log_gets_each_record_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "elasticlib"):
        records.log(RoundEnded(2, "rank 1 failed", restart=True))
        records.log(LogsKept("/tmp/100%s"))

    assert [(entry.name, entry.levelno, entry.getMessage()) for entry in caplog.records] == [
        ("elasticlib", logging.WARNING, "round 2 ended: rank 1 failed"),
        ("elasticlib", logging.INFO, "logs and error files are kept in /tmp/100%s"),
    ]


def test_each_sink_gets_each_record_in_turn() -> None:
    got: list[tuple[str, Record]] = []
    sink = records.fan_out(lambda record: got.append(("a", record)), lambda record: got.append(("b", record)))

    sink(STARTED)

    assert got == [("a", STARTED), ("b", STARTED)]


def test_a_sink_that_raises_is_logged_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    got: list[Record] = []

    def broken(record: Record) -> None:
        raise OSError("disk full")

    sink = records.fan_out(broken, got.append)
    sink(STARTED)
    sink(LogsKept("/tmp/logs"))

    assert got == [STARTED, LogsKept("/tmp/logs")]
    (entry,) = caplog.records
    assert "a record of class RoundStarted; the job continues" in entry.getMessage()
    assert entry.exc_info is not None


def test_interrupt_in_a_sink_is_not_a_failure_of_the_sink() -> None:
    def interrupted(record: Record) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.fan_out(interrupted)(STARTED)


def test_every_record_is_listed() -> None:
    # Python 3.10 takes an alias such as `Callable[[Record], None]` for a type.
    types = {name for name, each in vars(records).items() if isinstance(each, type) and get_origin(each) is None}
    made = types - {"Record", "WorkerPlace"}

    assert {each.__name__ for each in Record.__subclasses__()} == made
