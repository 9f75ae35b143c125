"""End of a cell that launches workers: stop button, twice; kernel restart; without its browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.kernel import LIMIT, Kernel
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

SETUP = """
import os, signal, time
from elasticlib import LaunchConfig, elastic_launch
config = LaunchConfig(nproc_per_node=2, max_restarts=0, preload=(), shutdown_timeout={grace})

def stays():
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        time.sleep(1)

def talks():
    number = 0
    while True:
        number += 1
        print("line", number, flush=True)
        if number > 2000:
            time.sleep(0.001)

def works(seconds):
    print("ready", flush=True)
    time.sleep(seconds)
    return int(os.environ["RANK"])
"""


class Cells(Kernel):
    """A kernel, and all its messages, by the cell that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, list[dict[str, Any]]] = {}

    def listen(self, number: str, is_enough: Callable[[], bool]) -> None:
        """Take what it prints until *is_enough* of the cell *number*."""
        until = time.monotonic() + LIMIT
        while not is_enough():
            assert time.monotonic() < until, self.messages.get(number)
            message = self._client.get_iopub_msg(timeout=LIMIT)
            self.messages.setdefault(message["parent_header"].get("msg_id", ""), []).append(message)

    def text(self, number: str) -> str:
        """Return the text of the cell's streams."""
        return "".join(each["content"]["text"] for each in self._of(number, "stream"))

    def errors(self, number: str) -> list[str]:
        """Names of the errors that the cell shows."""
        return [each["content"]["ename"] for each in self._of(number, "error")]

    def _of(self, number: str, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.messages.get(number, ()) if each["msg_type"] == kind]

    def begun(self, code: str, text: str) -> str:
        """Begin a cell, and wait until it shows *text*."""
        number = self.begin(code)
        self.listen(number, lambda: text in self.text(number))
        return number

    def ended(self, number: str) -> str:
        """Wait for the end of a cell; what its streams have shown."""
        self.listen(
            number, lambda: any(each["content"]["execution_state"] == "idle" for each in self._of(number, "status"))
        )
        return self.text(number)

    def restart(self) -> None:
        """As the menu does."""
        self._manager.restart_kernel(now=False)

    def leave_and_return(self) -> None:
        """The browser is closed, and another one opened."""
        self._client.stop_channels()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT)


@pytest.fixture
def cells() -> Iterator[Cells]:
    kernel = Cells()
    try:
        yield kernel
    finally:
        kernel.close()
        wait_until(lambda: not kernel.left())


def prepared(cells: Cells, grace: int) -> None:
    assert cells.ended(cells.begin(SETUP.format(grace=grace))) == ""


def test_first_interrupt_announces_that_a_second_kills_and_second_does(cells: Cells) -> None:
    prepared(cells, grace=100_000)  # only the second one can end it
    number = cells.begun("elastic_launch(config, stays)()", "ready")

    cells.interrupt()
    cells.listen(number, lambda: "or at once with another Ctrl-C" in cells.text(number))
    cells.interrupt()
    cells.ended(number)

    assert cells.errors(number) == ["LaunchInterrupted"]
    assert cells.ended(cells.begin("print(elastic_launch(config, works)(0))")).endswith("{0: 0, 1: 1}\n")


def test_nothing_of_a_stopped_cell_is_shown_in_a_later_one(cells: Cells) -> None:
    prepared(cells, grace=5)
    number = cells.begun("elastic_launch(config, talks)()", "line 1000\n")

    cells.interrupt()
    cells.ended(number)
    later = [cells.ended(cells.begin("print('later')")) for _ in range(5)]

    assert cells.errors(number) == ["LaunchInterrupted"]
    assert later == ["later\n"] * 5


def test_interrupt_ends_an_awaiting_cell_but_not_its_job(cells: Cells) -> None:
    prepared(cells, grace=0)
    number = cells.begun("job = elastic_launch(config, stays).start()\nawait job", "ready")

    cells.interrupt()
    cells.ended(number)

    assert cells.errors(number) == ["CancelledError"]
    assert cells.ended(cells.begin("print(job.status().state)")) == "running\n"
    assert cells.ended(cells.begin("job.stop(0)")) == ""
    number = cells.begun("with elastic_launch(config, stays).start() as job:\n    await job", "ready")

    cells.interrupt()
    cells.ended(number)

    assert cells.errors(number) == ["CancelledError"]
    assert cells.ended(cells.begin("print(job.status().state)")) == "stopped\n"


def test_a_restart_of_the_kernel_leaves_nothing_of_the_old_one(cells: Cells) -> None:
    prepared(cells, grace=5)
    cells.begun("job = elastic_launch(config, stays).start()\njob.result()", "ready")

    cells.restart()

    wait_until(lambda: not cells.left())


def test_cell_continues_without_its_browser(cells: Cells) -> None:
    prepared(cells, grace=5)
    cells.begun("found = elastic_launch(config, works)(3)", "ready")

    cells.leave_and_return()

    assert cells.ended(cells.begin("print(dict(found))")) == "{0: 0, 1: 1}\n"


THREADS = """
import contextvars, threading
one = LaunchConfig(nproc_per_node=1, max_restarts=0, preload=())
go, threads = threading.Event(), []

def wait(file):
    while not os.path.exists(file):
        time.sleep(0.01)

def prints(name, file=""):
    print(name, "begins")
    if file:
        open(file + "begun", "w").close()
        wait(file)
    print(name, "ends")

def launches(name):
    go.wait()
    elastic_launch(one, prints)(name)

def start(target, *args):
    threads.append(threading.Thread(target=target, args=args))
    threads[-1].start()
"""


def test_launch_of_a_thread_shows_in_the_cell_of_its_context(cells: Cells, tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    prepared(cells, grace=5)
    cells.ended(cells.begin(THREADS))
    first = cells.begin(
        f"""
start(elastic_launch(one, prints), "early", {file!r})
start(launches, "plain")
start(contextvars.copy_context().run, launches, "bound")
wait({file + "begun"!r})
"""
    )
    cells.ended(first)
    second = cells.begin(f"open({file!r}, 'w').close()\ngo.set()\nfor each in threads: each.join()")
    cells.ended(second)

    printed = {number: set(cells.text(number).splitlines()) for number in (first, second)}
    assert printed == {
        first: {"early begins", "early ends", "bound begins", "bound ends"},
        second: {"plain begins", "plain ends"},
    }
