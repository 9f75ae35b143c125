"""Several handlers of one program: their sidecars come from one process, and know nothing of each other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticlib.errors import RendezvousConnectionError, RendezvousError
from elasticlib.processes import handle_of
from elasticlib.processes._reaper import descendants
from elasticlib.rendezvous import RendezvousHandler, RendezvousParameters, get_rendezvous_handler
from tests.process.launches import free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.6)]

ROOT = Path(__file__).parents[3]
LIMIT = 90.0
"""Seconds that anything waited for may take."""


def command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def hosts() -> list[int]:
    """The processes that sidecars of this program are forked from."""
    me = os.getpid()
    return [pid for pid, parent, _ in descendants(me) if parent == me and b"sidecar._host" in command(pid)]


def sidecars() -> list[int]:
    """Those that were forked from them, and work."""
    every = hosts()
    return [pid for pid, parent, state in descendants(os.getpid()) if parent in every and state != "Z"]


@pytest.fixture
def made() -> Iterator[list[RendezvousHandler]]:
    made: list[RendezvousHandler] = []
    yield made
    for handler in made:
        handler.shutdown()
    wait_until(lambda: not hosts())


@pytest.fixture
def make(made: list[RendezvousHandler]) -> Callable[..., list[RendezvousHandler]]:
    def make(count: int, job: str = "job", **options: object) -> list[RendezvousHandler]:
        endpoint = f"127.0.0.1:{free_port()}"
        parameters = RendezvousParameters("c10d", endpoint, job, count, count, local_addr="127.0.0.1", **options)
        handlers = [get_rendezvous_handler(parameters) for _ in range(count)]
        made.extend(handlers)
        return handlers

    return make


def meet(*handlers: RendezvousHandler) -> list[int]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return [info.rank for info in pool.map(lambda handler: handler.next_rendezvous(), handlers)]


def test_sidecars_of_one_programs_handlers_start_from_one_process(
    make: Callable[..., list[RendezvousHandler]],
) -> None:
    handlers = make(4)

    assert [0, 1, 2, 3] == sorted(meet(*handlers))
    assert [0, 1, 2, 3] == sorted(meet(*handlers))
    assert 1 == len(hosts())
    assert 4 == len(sidecars())


def test_jobs_of_one_program_know_nothing_of_each_other(make: Callable[..., list[RendezvousHandler]]) -> None:
    mine, others = make(2, "one", token="secret"), make(2, "another", token="another secret")
    assert [0, 1] == sorted(meet(*mine))
    assert [0, 1] == sorted(meet(*others))
    assert 1 == len(hosts())
    secrets = {word for pid in (*hosts(), *sidecars()) for word in (b"secret", b"another") if word in command(pid)}
    assert set() == secrets

    for handler in mine:
        handler.shutdown()

    assert [0, 1] == sorted(meet(*others))


def test_a_sidecar_that_is_killed_is_an_error_of_its_own_handler_alone(
    make: Callable[..., list[RendezvousHandler]],
) -> None:
    [mine], others = make(1, "one"), make(2, "another")
    meet(mine)
    [first] = sidecars()
    assert [0, 1] == sorted(meet(*others))

    os.kill(first, signal.SIGKILL)

    with pytest.raises(RendezvousConnectionError, match=r"the sidecar .*of this node ended unexpectedly"):
        mine.next_rendezvous()
    assert [0, 1] == sorted(meet(*others))


def test_sidecars_outlive_their_host_and_the_next_gets_another_host(
    make: Callable[..., list[RendezvousHandler]],
) -> None:
    mine, [other] = make(2, "one"), make(1, "another")
    meet(*mine)
    [host] = hosts()

    os.kill(host, signal.SIGKILL)
    wait_until(lambda: host not in [pid for pid, _, state in descendants(os.getpid()) if state != "Z"])

    assert [0, 1] == sorted(meet(*mine))
    assert [0] == meet(other)
    assert host not in hosts()


def test_end_of_that_process_at_its_imports_is_an_error_for_all(
    make: Callable[..., list[RendezvousHandler]],
) -> None:
    [handler] = make(1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(handler.next_rendezvous)
        wait_until(hosts)
        for host in hosts():
            os.kill(host, signal.SIGKILL)

        with pytest.raises(RendezvousError, match=r"the sidecar .*of this node ended unexpectedly"):
            waits.result(LIMIT)


def test_a_program_that_changed_its_environment_gets_another_process(
    make: Callable[..., list[RendezvousHandler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    [one], [another] = make(1, "one"), make(1, "another")
    meet(one)
    monkeypatch.setenv("SOME_VARIABLE", "changed")
    meet(another)

    assert 2 == len(hosts())
    another.shutdown()
    wait_until(lambda: 1 == len(hosts()))


def test_nothing_outlives_a_program_that_is_killed() -> None:
    script = """
        import os, sys
        from concurrent.futures import ThreadPoolExecutor
        from elasticlib.rendezvous import RendezvousParameters, get_rendezvous_handler
        from elasticlib.processes._reaper import descendants
        parameters = RendezvousParameters("c10d", sys.argv[1], "job", 3, 3, local_addr="127.0.0.1")
        handlers = [get_rendezvous_handler(parameters) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
        print(*(pid for pid, _, _ in descendants(os.getpid())), flush=True)
        sys.stdin.read()
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), f"127.0.0.1:{free_port()}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with program:
        assert program.stdout is not None
        processes = [handle_of(int(pid)) for pid in program.stdout.readline().split()]
        assert 4 == len(processes)
        for process in processes[:2]:
            process.send(signal.SIGSTOP)
        program.kill()

    wait_until(lambda: all(process.has_ended() for process in processes))
    for process in processes:
        process.close()
