"""Jobs with ids of their own on one c10d endpoint: the store of one serves the others, for as long as they live."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

LIMIT = 60.0
WORK = "import sys; print('at work', flush=True); sys.stdin.read(); print('done', flush=True)"
"""A worker that works until its standard input ends."""


class Launch:
    """``elasticrun`` of a job of one node on the shared endpoint, with one worker."""

    def __init__(self, port: int, run_id: str, **conf: object) -> None:
        options = {"heartbeat_timeout": 10, "reconnect_timeout": 10, **conf}
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "elasticlib.run", "--nnodes", "1:2", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", run_id, "--max-restarts", "0"),
                *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in {"wait_for": "min", **options}.items())),
                *("--no-python", sys.executable, "-c", WORK),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.log: list[str] = []
        self._news = threading.Condition()
        self._silent = 0
        """How many of its streams have ended."""
        self._readers = [
            threading.Thread(target=self._read, args=(file,)) for file in (self.popen.stdout, self.popen.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            with self._news:
                self.log.append(line.rstrip())
                self._news.notify_all()
        with self._news:
            self._silent += 1
            self._news.notify_all()

    def says(self, text: str) -> str:
        """The line that holds *text*, once it is there."""
        with self._news:
            assert self._news.wait_for(lambda: self._silent == 2 or any(text in line for line in self.log), LIMIT)
            said = [line for line in self.log if text in line]
            assert said, self.log
            return said[0]

    def at_work(self) -> Launch:
        self.says("at work")
        return self

    def finish(self) -> None:
        """Let its worker end well."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.says("done")

    def rendezvous_process(self) -> int:
        """The process that keeps its contact, and its store where it hosts one."""
        found = Path(f"/proc/{self.popen.pid}/task").glob("*/children")
        children = [int(pid) for each in found for pid in each.read_text().split()]
        [pid] = [pid for pid in children if b"_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid

    def ends(self) -> tuple[int, str]:
        """Its exit status, and all that it said."""
        status = self.popen.wait(LIMIT)
        for reader in self._readers:
            reader.join()
        return status, "\n".join(self.log)

    def close(self) -> None:
        self.popen.kill()
        self.ends()
        for file in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            assert file is not None
            file.close()


Start = Callable[..., Launch]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts jobs on one endpoint; the first one hosts the store."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launches: list[Launch] = []

    def new(run_id: str, **conf: object) -> Launch:
        launches.append(Launch(port, run_id, **conf))
        return launches[-1]

    yield new
    for launch in launches:
        launch.close()


def pair(start: Start, **conf: object) -> tuple[Launch, Launch]:
    """Two jobs at work: the host of the store, and a guest."""
    host = start("host", **conf).at_work()
    return host, start("guest").at_work()


def test_a_store_stays_until_the_other_jobs_on_it_have_ended(start: Start) -> None:
    host, guest = pair(start)

    host.finish()
    line = host.says("stays")
    assert host.popen.poll() is None
    guest.finish()

    assert 0 == guest.ends()[0]
    status, said = host.ends()
    assert (0, 1) == (status, said.count("stays"))
    assert "'guest'" in line


def test_a_store_that_stays_goes_after_its_time_and_the_guests_end_naming_it(start: Start) -> None:
    host, guest = pair(start, store_linger=1)

    host.finish()

    assert 0 == host.ends()[0]
    status, said = guest.ends()
    assert (1, True) == (status, "of job 'host'" in said), said


def test_the_wait_for_guests_is_ended_by_ctrl_c_and_spoils_no_success(start: Start) -> None:
    host, guest = pair(start)
    host.finish()
    host.says("stays")

    host.popen.send_signal(signal.SIGINT)

    status, said = host.ends()
    assert (0, False) == (status, "Traceback" in said), said
    assert 1 == guest.ends()[0]


def test_an_operator_who_ends_the_host_waits_for_no_guest(start: Start) -> None:
    host, guest = pair(start)

    host.popen.send_signal(signal.SIGINT)

    assert 0 != host.ends()[0]
    status, said = guest.ends()
    assert (1, True) == (status, "of job 'host'" in said), said


def test_work_that_succeeded_is_not_failed_by_a_store_that_went(start: Start) -> None:
    host, guest = pair(start)
    store = host.rendezvous_process()

    os.kill(store, signal.SIGSTOP)  # from now on nobody hears that the guest's work is done
    guest.finish()
    os.kill(store, signal.SIGKILL)

    status, said = guest.ends()
    assert (0, True) == (status, "of job 'host'" in said), said


def test_the_id_of_a_job_that_stays_for_others_is_free_again(start: Start) -> None:
    host, guest = pair(start)
    host.finish()
    host.says("stays")

    again = start("host").at_work()
    again.finish()
    assert 0 == again.ends()[0]
    assert host.popen.poll() is None
    guest.finish()

    assert [0, 0] == [guest.ends()[0], host.ends()[0]]


def test_the_id_of_a_guest_whose_machine_died_can_be_claimed_again_after_two_heartbeats(start: Start) -> None:
    host, guest = pair(start)
    process = guest.rendezvous_process()
    for pid in (process, guest.popen.pid):
        os.kill(pid, signal.SIGSTOP)  # so that neither can speak for the other
    for pid in (process, guest.popen.pid):
        os.kill(pid, signal.SIGKILL)

    again = start("guest", heartbeat_timeout=2).at_work()
    again.finish()
    assert 0 == again.ends()[0]
    host.finish()

    assert 0 == host.ends()[0]
