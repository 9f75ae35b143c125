"""Absence of leftovers after any end of a run of `LocalElasticAgent`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticlib.agent import LocalElasticAgent
from elasticlib.errors import LaunchInterrupted, PicklingError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.rendezvous import Rules, open_local
from elasticlib.spec import Std, WorkerSpec
from elasticlib.workers._fork_servers import fork_servers

pytestmark = pytest.mark.slow


class Stubborn:
    """A value that cannot be rebuilt."""

    def __reduce__(self) -> Any:
        return cannot_be_rebuilt, ()


def cannot_be_rebuilt() -> None:
    raise ValueError("a bad value")


def returns_its_rank() -> int:
    print("at work")
    return int(os.environ["RANK"])


def fails() -> None:
    raise ValueError("a bad value")


def returns_what_cannot_be_rebuilt() -> Stubborn:
    return Stubborn()


def ends_with_its_launcher(launcher: int) -> None:
    os.kill(launcher, signal.SIGINT)
    signal.pause()


@pytest.mark.parametrize(
    ("entrypoint", "args", "raised"),
    [
        (returns_its_rank, (), None),
        (fails, (), None),
        (returns_what_cannot_be_rebuilt, (), PicklingError),
        (ends_with_its_launcher, (os.getpid(),), LaunchInterrupted),
    ],
    ids=["success", "failure", "error", "signal"],
)
def test_a_run_leaves_neither_spawner_nor_thread_nor_a_busy_fork_server(
    entrypoint: Callable[..., object], args: tuple[Any, ...], raised: type[BaseException] | None, tmp_path: Path
) -> None:
    threads, busy = threading.enumerate(), {each: each.spawners for each in fork_servers._kept}
    with open_local("job", Rules()) as rendezvous:
        spec = WorkerSpec("trainer", 2, rendezvous, entrypoint=entrypoint, args=args, preload=())
        logs = DefaultLogsSpecs(str(tmp_path), Std.ALL, Std.ALL)
        agent = LocalElasticAgent(spec, logs, sink=lambda record: None)
        with pytest.raises(raised) if raised else contextlib.nullcontext():
            agent.run()

    assert agent._processes._supervisor.client is None and tuple(agent._watched()) == ()
    assert threading.enumerate() == threads
    assert [] == [each for each in fork_servers._kept if each.spawners != busy.get(each, 0)]
