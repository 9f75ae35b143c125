"""
Promise 23: one of two pods is lost and replaced, as a TrainJob replaces it, and both train again.

A pod is a machine of its own. Its place is only in the variables of its engine, and its replacement, with another name
and address, starts after 4 s.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from attrs import frozen

from tests.benchmarks import journal, tree
from tests.benchmarks.figures import Benchmark, Figure, Goal, Turn
from tests.benchmarks.job import JOBS, BenchmarkError, environment, new_folder
from tests.benchmarks.launchers import Launcher
from tests.benchmarks.lost_node import HEARTBEAT
from tests.hosts._netns import Host, machines, missing
from tests.waiting import wait_until

PODS = 2
AFTER = 4.0
"""Seconds from the loss to the start of the replacement."""
LIMIT = 60.0
"""Seconds after which nobody trains again: the value is then this one."""


@frozen
class Replacements:
    """Seconds from the loss of a pod to the first step of both pods."""

    killed: float
    """Its processes were killed: their connections end."""
    silent: float
    """Its machine was lost: only silence shows it."""


def variables(pod: int, first: Host) -> dict[str, str]:
    """Return what a TrainJob of two pods, and Kubernetes, set in this one."""
    return {
        "JOB_COMPLETION_INDEX": str(pod),
        "PET_NNODES": str(PODS),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(pod),
        "PET_MASTER_ADDR": first.name,
        "PET_MASTER_PORT": "29500",
    }


def measure(launcher: Launcher, turn: Turn) -> Replacements:
    """Lose a pod in both ways."""
    return Replacements(_replace(launcher, _kill), _replace(launcher, lambda host, folder: host.lose()))


def _replace(launcher: Launcher, lose: Callable[[Host, Path], object]) -> float:
    if why := missing():
        raise BenchmarkError(why)
    with ExitStack() as stack:
        folder = stack.enter_context(new_folder())
        first, lost, replacement = stack.enter_context(machines(3))
        _start(stack, launcher, folder, first, variables(0, first))
        _start(stack, launcher, folder, lost, variables(1, first))
        if not _all_step(folder, 0.0):
            raise BenchmarkError(f"two pods do not train:\n{_output(folder)}")

        at = time.monotonic()
        lose(lost, folder)
        time.sleep(AFTER)  # until Kubernetes has started the other pod
        _start(stack, launcher, folder, replacement, variables(1, first))
        if not _all_step(folder, at):
            return LIMIT
        return max(mark.at for mark in journal.read(folder)) - at


def _start(stack: ExitStack, launcher: Launcher, folder: Path, host: Host, own: Mapping[str, str]) -> None:
    command = [*launcher.command, "--max-restarts=3", str(JOBS / "pod_steps.py")]
    output = stack.enter_context(open(folder / f"output.{host.name}", "wb"))
    settings = {"env": environment(folder, own), "cwd": folder, "stdin": subprocess.DEVNULL}
    process = host.popen(command, stdout=output, stderr=output, start_new_session=True, **settings)
    stack.callback(process.wait)
    stack.callback(lambda: tree.kill_all(tree.of_job(None, folder), folder))


def _kill(host: Host, folder: Path) -> None:
    """Kill all processes of the job on one *host*."""
    here = host.network()
    tree.kill(each for each in tree.of_job(None, folder) if tree.network(each.pid) == here)


def _all_step(folder: Path, after: float) -> bool:
    """Return True once each rank has made a first step *after* that time, and False if one never does."""

    def ranks() -> set[int]:
        return {mark.rank for mark in journal.read(folder) if mark.at > after}

    try:
        wait_until(lambda: len(ranks()) == PODS, LIMIT)
    except AssertionError:
        return False
    return True


def _output(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-1000:] for path in sorted(folder.glob("output.*")))


REPLACED_POD = Benchmark(
    "replaced pod",
    measure,
    (
        Figure(
            23,
            f"pod killed, replaced after {AFTER:g} s, to both training ({LIMIT:g}: never)",
            "s",
            "killed",
            (Goal(HEARTBEAT + 2),),
        ),
        Figure(
            23,
            f"pod lost silently, replaced after {AFTER:g} s, to both training ({LIMIT:g}: never)",
            "s",
            "silent",
            (Goal(HEARTBEAT + 2),),
        ),
    ),
)
