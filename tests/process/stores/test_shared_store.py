"""Jobs with ids of their own on one c10d endpoint: the store of one serves the others, for as long as they live."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.process.launches import Launch, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

Start = Callable[..., Launch]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts jobs on one endpoint; the first one hosts the store."""
    port = free_port()
    launches: list[Launch] = []

    def new(run_id: str, **conf: object) -> Launch:
        launches.append(Launch(port, run_id, **conf))
        return launches[-1]

    yield new
    for launch in launches:
        launch.close()


def pair(start: Start, **conf: object) -> tuple[Launch, Launch]:
    """Two jobs at work: the host of the store, and a joined job."""
    host = start("host", **conf).at_work()
    return host, start("other").at_work()


def test_a_store_stays_until_the_other_jobs_on_it_have_ended(start: Start) -> None:
    host, other = pair(start)

    host.finish()
    line = host.wait_for_line("stays")
    assert host.popen.poll() is None
    other.finish()

    assert 0 == other.ends()[0]
    status, output = host.ends()
    assert (0, 1) == (status, output.count("stays"))
    assert "'other'" in line


def test_store_ends_after_its_linger_time_and_joined_jobs_name_its_job(start: Start) -> None:
    host, other = pair(start, store_linger=1)

    host.finish()

    assert 0 == host.ends()[0]
    status, output = other.ends()
    assert (1, True) == (status, "of job 'host'" in output), output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait_for_joined_jobs_and_keeps_success(signum: signal.Signals, start: Start) -> None:
    host, other = pair(start)
    host.finish()
    host.wait_for_line("stays")

    host.popen.send_signal(signum)

    status, output = host.ends()
    assert (0, False) == (status, "Traceback" in output), output
    assert 1 == other.ends()[0]


def test_interrupted_host_waits_for_no_joined_job(start: Start) -> None:
    host, other = pair(start)

    host.popen.send_signal(signal.SIGINT)

    assert 0 != host.ends()[0]
    status, output = other.ends()
    assert (1, True) == (status, "of job 'host'" in output), output


def test_work_that_succeeded_is_not_failed_by_a_store_that_went(start: Start) -> None:
    host, other = pair(start)
    store = host.rendezvous_process()

    os.kill(store, signal.SIGSTOP)  # from now on nobody hears that the joined job's work is done
    other.finish()
    os.kill(store, signal.SIGKILL)

    status, output = other.ends()
    assert (0, True) == (status, "of job 'host'" in output), output


def test_the_id_of_a_job_that_stays_for_others_is_free_again(start: Start) -> None:
    host, other = pair(start)
    host.finish()
    host.wait_for_line("stays")

    again = start("host").at_work()
    again.finish()
    assert 0 == again.ends()[0]
    assert host.popen.poll() is None
    other.finish()

    assert [0, 0] == [other.ends()[0], host.ends()[0]]


def test_id_of_job_on_dead_machine_is_free_again_after_two_heartbeats(start: Start) -> None:
    host, other = pair(start)
    process = other.rendezvous_process()
    for pid in (process, other.popen.pid):
        os.kill(pid, signal.SIGSTOP)  # so that neither can speak for the other
    for pid in (process, other.popen.pid):
        os.kill(pid, signal.SIGKILL)

    again = start("other", heartbeat_timeout=2).at_work()
    again.finish()
    assert 0 == again.ends()[0]
    host.finish()

    assert 0 == host.ends()[0]
