"""Stores of torch that freeze, die, are not what they seem, or are shared with strangers."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
)
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._binding import Elsewhere
from elasticlib.rendezvous.net._dial import RefusedError
from elasticlib.rendezvous.net._endpoint import spell
from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS, resolve
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, COORDINATOR_HEARTBEAT, Exchange
from elasticlib.rendezvous.protocol._messages import Announcement, Terms, encode
from elasticlib.rendezvous.stores import _c10d
from elasticlib.rendezvous.stores._c10d import C10dBackend
from elasticlib.rendezvous.stores._election import LeadershipLost
from elasticlib.rendezvous.stores._file_store import sign
from elasticlib.rendezvous.stores._shared_store import Claim, OtherJobs
from elasticlib.rendezvous.stores._torch_store import StoreExchange
from tests.process.stores.exchanges import answering

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]
SCRIPT = Path(__file__).parents[1] / "scripts" / "c10d_host.py"
LONG = 30.0
ALONE = """
import os, socket, subprocess, sys
_, _, endpoint, *command = sys.argv
host, port = endpoint.split(":")
socket.create_connection((host, int(port)), 10).close()
for tried in (int(port), int(os.environ["MASTER_PORT"])):
    try:
        socket.create_connection(("127.0.0.2", tried), 10).close()
        print("reached", flush=True)
    except ConnectionRefusedError:
        print("refused", flush=True)
print(os.environ["MASTER_ADDR"], flush=True)
sys.exit(subprocess.run(command).returncode)
"""
"""Of a worker: tries the two ports by an address of this machine that is not the name's, then runs a command."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", QUIET_LOOKUPS)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


def job(**facts: Any) -> NodeJob:
    return NodeJob(**{"run_id": "run", "node": "n", "backend": "c10d"} | facts)


Open = Callable[..., C10dBackend]


@pytest.fixture
def backend() -> Iterator[Open]:
    opened = []

    def open_backend(endpoint: str, run_id: str = "run", **facts: Any) -> C10dBackend:
        opened.append(C10dBackend(job(endpoint=endpoint, run_id=run_id, **{"max_nodes": 9} | facts)))
        return opened[-1]

    yield open_backend
    for each in opened:
        each.close()


@pytest.fixture
def host() -> Iterator[subprocess.Popen[str]]:
    """Another process that hosts a store; `endpoint` of it is its first line."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "localhost:0", "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    with process:
        yield process
        process.kill()


def endpoint_of(host: subprocess.Popen[str]) -> str:
    assert host.stdout is not None
    return host.stdout.readline().strip()


def served(backend: C10dBackend) -> C10dBackend:
    assert backend.serve(time.monotonic() + LONG)
    return backend


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def freeze(pid: int) -> None:
    """Stop a process, and come back when all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + LONG
    while not all(
        stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestWhoHosts:
    def test_of_many_on_one_machine_exactly_one_hosts_and_all_meet(self, backend: Open) -> None:
        endpoint = f"localhost:{free_port()}"
        nodes = [backend(endpoint) for _ in range(8)]
        start = threading.Barrier(8)

        def take_part(node: C10dBackend) -> tuple[bool, Exchange]:
            start.wait(LONG)
            return node.serve(time.monotonic() + LONG), node.dial(LONG)

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(take_part, nodes))

        assert [True] == [hosts for hosts, _ in outcomes if hosts]
        outcomes[0][1].write({"key": b"1"})
        assert [[b"1"]] * 8 == [exchange.read(["key"]) for _, exchange in outcomes]

    @pytest.mark.parametrize("endpoint", ["localhost:0", "127.0.0.1:0", "[::1]:0"])
    def test_endpoint_names_the_free_port_of_the_store(self, backend: Open, endpoint: str) -> None:
        node = served(backend(endpoint))

        other = backend(node.endpoint)

        assert node.port != 0
        assert not other.serve(time.monotonic() + LONG)
        assert other.served_run(other.dial(LONG)) == "run"
        assert other.address() == ("::1" if "::1" in endpoint else "127.0.0.1")

    def test_a_loopback_endpoint_listens_on_loopback_alone(self, backend: Open) -> None:
        node = served(backend("localhost:0"))

        with pytest.raises(RefusedError):
            backend(f"127.0.0.2:{node.port}").dial(LONG)

    def test_our_own_name_in_the_hosts_file_is_served_to_all(
        self, backend: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_c10d, "resolve", lambda host, port, timeout: resolve("127.0.1.1", port, timeout))
        node = served(backend(f"{socket.gethostname()}:0"))

        assert backend(f"127.0.0.2:{node.port}").dial(LONG)
        node.dial(LONG)
        assert not (node.address() or "").startswith("127.")

    def test_a_job_of_one_node_is_reached_by_the_name_alone(self) -> None:
        """By another job of this machine, too; whoever comes another way is refused."""
        options = ["-m", "elasticlib.run", "--rdzv-backend", "c10d", "--no-python", "--max-restarts", "0"]
        endpoint = ["--rdzv-endpoint", f"{socket.gethostname()}:{free_port()}"]
        inner = [sys.executable, *options, *endpoint, "--rdzv-id", "joined", sys.executable, "-c", "print('met')"]

        done = subprocess.run(
            [sys.executable, *options, *endpoint, "--rdzv-id", "host", sys.executable, "-c", ALONE, *endpoint, *inner],
            capture_output=True,
            text=True,
            timeout=120,
            env={name: value for name, value in os.environ.items() if name != "RES_OPTIONS"},
        )

        assert (0, ["refused", "refused", "127.0.0.1", "met"]) == (done.returncode, done.stdout.split()), done.stderr

    @pytest.mark.parametrize("facts", [{"is_host": False}, {"backend": "static", "node_rank": 1}])
    def test_node_that_must_not_host_does_not_host(self, facts: dict[str, Any]) -> None:
        node = C10dBackend(job(**{"endpoint": "localhost:0"} | facts))

        assert not node.serve(time.monotonic() + LONG)

    @pytest.mark.parametrize(
        ("facts", "why"),
        [
            ({"is_host": True}, "^is_host=1, but another process already listens on 127.0.0.1:"),
            ({"backend": "static", "node_rank": 0}, "^node_rank=0, but another process already listens on 127.0.0.1:"),
        ],
    )
    def test_node_that_must_host_reports_another_process_on_its_port(self, facts: dict[str, Any], why: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = spell(*server.getsockname())
            node = C10dBackend(job(**{"endpoint": endpoint} | facts))

            with pytest.raises(RendezvousConnectionError, match=why):
                node.serve(time.monotonic() + LONG)

    @pytest.mark.parametrize(
        ("facts", "reason"), [({"is_host": True}, "is_host=1"), ({"backend": "static", "node_rank": 0}, "node_rank=0")]
    )
    def test_two_nodes_that_must_host_one_job_are_both_named(
        self, backend: Open, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], reason: str
    ) -> None:
        first = served(backend(f"localhost:{free_port()}", **facts))
        announcement = Announcement("run", "nonce", "first", Terms(1, 9, 3), 10.0)
        first.dial(LONG).write({ANNOUNCEMENT: encode(announcement)})
        second = backend(first.endpoint, **facts)

        with pytest.raises(RendezvousConnectionError) as at_first:  # the store may be that of a killed predecessor
            second.serve(time.monotonic() + LONG)
        monkeypatch.setattr(_c10d, "PREDECESSOR", 0.0)
        with pytest.raises(ConfigError) as later:
            second.serve(time.monotonic() + LONG)

        why = f"{reason} was given twice: node first hosts job 'run' there already, and node n must host it too"
        assert [why] * 2 == [str(at_first.value), str(later.value)]

    def test_node_that_must_host_at_an_address_elsewhere_is_refused(self, backend: Open) -> None:
        node = backend(f"192.0.2.7:{free_port()}", is_host=True)

        with pytest.raises(ConfigError, match=r"^is_host=1, but 192.0.2.7 is not an address of this machine"):
            node.serve(time.monotonic() + 1)

    def test_node_that_must_host_behind_a_forwarded_address_hosts(
        self, backend: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_c10d, "bind_endpoint", lambda *_, **__: Elsewhere("it is forwarded"))
        node = served(backend(f"127.0.0.3:{free_port()}", is_host=True))

        assert backend(node.endpoint).dial(LONG)

    @pytest.mark.parametrize(
        ("facts", "why"),
        [
            ({"store_type": "udp"}, "store_type='udp'"),
            ({"store_type": "file", "endpoint": ""}, "needs the path of a file"),
            ({"store_type": "file", "endpoint": "/x", "is_host": True}, "is_host=True cannot be used"),
            ({"endpoint": "host:99999"}, "port '99999'"),
        ],
    )
    def test_contradictory_settings_are_refused_before_any_wait(self, facts: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            C10dBackend(job(**{"endpoint": "host", "max_nodes": 2} | facts))


class TestDial:
    def test_the_time_of_an_attempt_begins_when_torch_is_there(
        self, backend: Open, host: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a program that keeps its rendezvous itself, torch may be imported by the very attempt to connect."""
        node, prepare = backend(endpoint_of(host)), C10dBackend.prepare

        def slow(self: C10dBackend) -> None:
            prepare(self)
            threading.Event().wait(2.2)

        monkeypatch.setattr(C10dBackend, "prepare", slow)

        exchange = node.dial(2.0)

        assert "run" == exchange.served_run  # type: ignore[attr-defined]

    def test_unknown_host_name_raises_its_own_error(self, backend: Open) -> None:
        with pytest.raises(RendezvousConnectionError, match=r"^name not found: 'nosuchhost\.invalid'"):
            backend("nosuchhost.invalid:29400").dial(LONG)

    def test_refused_connection_raises_its_own_error(self, backend: Open) -> None:
        with pytest.raises(RefusedError, match="no process listens there"):
            backend(f"localhost:{free_port()}").dial(LONG)

    def test_server_that_accepts_and_sends_nothing_is_not_a_store(self, backend: Open) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            node = backend(spell(*server.getsockname()))

            def dial() -> None:
                with pytest.raises(
                    RendezvousConnectionError, match=r"\(127.0.0.1\) answers, but is not a store: another"
                ):
                    node.dial(0.5)

            assert seconds(dial) < 3

    def test_server_with_another_protocol_is_not_a_store(self, backend: Open) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer() -> None:
                for _ in range(2):  # the one that finds out who listens, and torch's
                    with server.accept()[0] as stranger:
                        stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()

            with pytest.raises(RendezvousConnectionError, match="answers, but is not a store"):
                backend(spell(*server.getsockname())).dial(2.0)

    def test_a_frozen_host_breaks_no_time_limit(
        self, backend: Open, host: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_c10d, "CLONE", 0.5)
        node = backend(endpoint_of(host))
        exchange = node.dial(LONG)
        freeze(host.pid)

        def dial() -> None:
            with pytest.raises(RendezvousConnectionError, match="the store's process is stopped"):
                node.dial(0.5)

        def clone() -> None:
            with pytest.raises(RendezvousConnectionError, match="does not answer any more"):
                exchange.clone()

        assert seconds(dial) < 3
        assert seconds(clone) < 3
        host.send_signal(signal.SIGCONT)
        assert node.served_run(node.dial(LONG)) == "run"

    def test_a_dead_host_is_noticed_at_once(self, backend: Open, host: subprocess.Popen[str]) -> None:
        node = backend(endpoint_of(host))
        exchange, waiting = node.dial(LONG), node.dial(LONG)
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(waiting.wait, "key", None)
            host.kill()
            host.wait()

            def read() -> None:
                with pytest.raises(RendezvousConnectionError, match=f"^lost the store at {node.endpoint}: "):
                    exchange.read(["key"])

            assert seconds(read) < 1
            with pytest.raises(RendezvousConnectionError, match=r"^lost the store"):
                waiter.result(5)
        with pytest.raises(RefusedError):
            node.dial(LONG)


class TestStrangers:
    def test_two_jobs_on_one_endpoint_stay_apart(self, backend: Open) -> None:
        first = served(backend("localhost:0", "a"))
        second, third = backend(first.endpoint, "a/b"), backend(first.endpoint, "a/b")
        mine, theirs = first.dial(LONG), second.dial(LONG)
        mine.write({"b/key": b"1"})
        mine.post(b"1")

        assert [None, None] == theirs.read(["key", "b/key"])
        assert [] == list(theirs.receive(0.0))
        assert "a" == first.served_run(mine) == second.served_run(theirs)
        claims = [second.claim(second.dial(LONG))]
        theirs.write({ANNOUNCEMENT: b"whatever its token and version"})
        with answering(second.dial(LONG)):
            claims.append(third.claim(third.dial(LONG)))
        assert [True, False] == claims

    def test_job_of_a_silent_claimant_is_claimed_after_two_heartbeats(self, backend: Open) -> None:
        first = served(backend("localhost:0", "a"))
        dead, second, third = (claim(name) for name in ("dead", "second", "third"))
        exchange = join_store(backend, first, "b")
        assert dead.take(exchange)
        exchange.write({ANNOUNCEMENT: b"the dead one's", COORDINATOR_HEARTBEAT: b"its last"})
        exchange.post(b"for the dead one")
        with pytest.raises(RendezvousConnectionError, match=r"job 'b' exists, but .*; it can be restarted in 20\.0 s"):
            second.take_over(exchange)
        third.clock = second.clock = lambda: 19.9
        for early in (second, third):
            with pytest.raises(RendezvousConnectionError, match=r"job 'b' exists"):
                early.take_over(exchange)

        second.clock = third.clock = lambda: 40.0

        assert second.take_over(exchange)
        assert [None, None] == exchange.read([ANNOUNCEMENT, COORDINATOR_HEARTBEAT])
        with pytest.raises(RendezvousConnectionError, match=r"job 'b' exists"):
            third.take_over(exchange)  # it has watched that one for no time at all
        exchange.post(b"for the living one")
        found = second.coordinating(exchange).receive(LONG)
        assert [b"for the living one"] == [entry.data for entry in found if entry.data]

    def test_of_two_that_claim_a_job_again_one_has_it(self, backend: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        first = served(backend("localhost:0", "a"))
        exchange = join_store(backend, first, "b")
        late = claim("late")
        assert claim("dead").take(exchange)
        with pytest.raises(RendezvousConnectionError, match=r"job 'b' exists"):
            late.take_over(exchange)
        late.clock = lambda: 21.0

        def count(self: StoreExchange, folder: str) -> int:
            """In this moment the other one is faster."""
            assert b"early" == self.replace("claimant", b"dead", b"early")
            return 0

        monkeypatch.setattr(StoreExchange, "count", count)

        with pytest.raises(RendezvousConnectionError, match="another node has just restarted job 'b'"):
            late.take_over(exchange)
        assert [b"early"] == exchange.read(["claimant"])

    def test_a_claimant_that_was_only_paused_writes_nothing_any_more(self, backend: Open) -> None:
        first = served(backend("localhost:0", "a"))
        exchange = join_store(backend, first, "b")
        paused, heir = claim("paused"), claim("heir")
        assert paused.take(exchange)
        old = paused.coordinating(exchange)
        old.write({ANNOUNCEMENT: b"old"})
        with pytest.raises(RendezvousConnectionError):
            heir.take_over(exchange)
        heir.clock = lambda: 21.0
        assert heir.take_over(exchange)
        heir.coordinating(exchange).write({ANNOUNCEMENT: b"new"})

        with pytest.raises(LeadershipLost, match="another node restarted job 'b'"):
            old.write({ANNOUNCEMENT: b"old"})
        paused.give_up(exchange)
        assert [b"new"] == exchange.read([ANNOUNCEMENT])

    def test_joined_job_lives_while_its_heartbeat_changes_until_its_end(self, backend: Open) -> None:
        first = served(backend("localhost:0", "a"))
        now = 0.0
        other_jobs = OtherJobs(join_store(backend, first, "a"), lambda: now)
        none = other_jobs.living()
        claims = {run_id: (claim(run_id, run_id), join_store(backend, first, run_id)) for run_id in ("b", "c/d", "e")}
        for each, exchange in claims.values():
            assert each.take(exchange)
        seen = [other_jobs.living()]
        for pulse in (b"1", b"2"):
            now += 19.0
            claims["b"][1].write({COORDINATOR_HEARTBEAT: pulse})
            claims["c/d"][1].write({COORDINATOR_HEARTBEAT: pulse})
            seen.append(other_jobs.living())
        claims["b"][0].give_up(claims["b"][1])
        seen.append(other_jobs.living())

        assert [] == none
        assert [["b", "c/d", "e"], ["b", "c/d", "e"], ["b", "c/d"], ["c/d"]] == seen

    @pytest.mark.parametrize(
        "lie",
        [
            *(b"", b"\xff", b"{}", b"[]", b"null", b"[" * 100_000, b'{"run_id": 1, "heartbeat": 1}'),
            *(b'{"run_id": "\\ud800", "heartbeat": 1}', b'{"run_id": "x", "heartbeat": 1e999}'),
            *(b'{"run_id": "x", "heartbeat": NaN}', b'{"run_id": "x", "heartbeat": 1' + b"0" * 400 + b"}"),
            *(b'{"run_id": "", "heartbeat": 1}', b'{"run_id": "x", "heartbeat": true}'),
        ],
    )
    def test_invalid_announcement_of_a_joining_job_delays_no_host(self, backend: Open, lie: bytes) -> None:
        first = served(backend("localhost:0", "a"))
        exchange = join_store(backend, first, "")
        exchange.append("guests", lie)

        assert [] == OtherJobs(exchange, lambda: 0.0).living()

    @pytest.mark.parametrize("lie", [b"garbage", b"", b"-5", b"9" * 5000, b"\xff"])
    def test_destroyed_register_of_joining_jobs_delays_no_host(self, backend: Open, lie: bytes) -> None:
        first = served(backend("localhost:0", "a"))
        scribble(first, "elasticlib//guests", lie)
        reported: list[list[str]] = []

        first.stay(LONG, reported.append, threading.Event())

        assert [] == reported

    def test_id_of_a_joined_job_is_free_again_after_its_end(self, backend: Open) -> None:
        first = served(backend("localhost:0", "a"))
        other = backend(first.endpoint, "b")
        exchange = other.dial(LONG)
        claimed = other.claim(exchange)
        exchange.post(b"1")
        exchange.write({ANNOUNCEMENT: b"{}"})
        other.forget_job()
        follower = backend(first.endpoint, "b")
        later = follower.dial(LONG)

        assert claimed
        assert [None] == later.read([ANNOUNCEMENT])
        assert follower.claim(later)
        later.post(b"2")
        assert [b"2"] == [entry.data for entry in later.receive(LONG)]

    def test_bytes_that_are_not_a_valid_request_kill_no_store(self, backend: Open) -> None:
        node = served(backend("localhost:0"))
        exchange = node.dial(LONG)
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4000, secrets.token_bytes(4000), b""):
            with socket.create_connection(("127.0.0.1", node.port)) as stranger:
                stranger.sendall(junk)

        exchange.write({"key": b"1"})
        assert [b"1"] == node.dial(LONG).read(["key"])

    def test_bytes_that_strangers_write_under_our_keys_are_only_bytes(self, backend: Open) -> None:
        node = served(backend("localhost:0"))
        exchange = node.dial(LONG)
        junk = secrets.token_bytes(1000)
        scribble(node, "elasticlib/run/key", junk)
        scribble(node, "elasticlib/serves", b"\xff")

        assert [junk] == exchange.read(["key"])
        assert "\ufffd" == node.served_run(node.dial(LONG))

    @pytest.mark.parametrize("lie", [b"garbage", b"", b"-5", b"1000000000", b"9" * 30, b"\xff"])
    def test_a_destroyed_counter_is_a_clear_error(self, backend: Open, lie: bytes) -> None:
        node = served(backend("localhost:0"))
        exchange = node.dial(LONG)
        exchange.post(b"1")
        exchange.receive(LONG)
        scribble(node, "elasticlib/run/inbox", lie)

        with pytest.raises(RendezvousStateError, match="inbox counter was overwritten"):
            exchange.receive(0.0)

    def test_deleting_the_counter_is_a_clear_error(self, backend: Open) -> None:
        node = served(backend("localhost:0"))
        exchange = node.dial(LONG)
        exchange.post(b"1")
        exchange.receive(LONG)
        raw(node).delete_key("elasticlib/run/inbox")

        with pytest.raises(RendezvousStateError, match="it went from 1 to 0"):
            exchange.receive(0.0)

    def test_keys_of_workers_are_cleared_and_ours_are_not(self, backend: Open) -> None:
        node = served(backend("localhost:0"))
        exchange = node.dial(LONG)
        exchange.write({"key": b"1"})
        for number in range(100):
            raw(node).set(f"worker/{number}", b"x")
        raw(node).add("counter", 1)

        exchange.clear_foreign()

        assert all(key.startswith("elasticlib/") for key in raw(node).list_keys())
        assert [b"1"] == exchange.read(["key"])
        assert "run" == node.served_run(node.dial(LONG))

    def test_a_poster_that_was_stopped_too_long_does_not_rely_on_its_entry(self, backend: Open) -> None:
        node = served(backend("localhost:0"))
        exchange = node.dial(LONG)
        assert isinstance(exchange, StoreExchange)
        times = iter([0.0, 45.0])
        exchange._clock = lambda: next(times)

        with pytest.raises(RendezvousConnectionError, match="took so long"):
            exchange.post(b"1")


def claim(name: str, run_id: str = "b") -> Claim:
    return Claim(run_id, 10.0, name.encode(), clock=lambda: 0.0)


def join_store(backend: Open, host: C10dBackend, run_id: str) -> StoreExchange:
    """A connection of another job to the store that *host* hosts."""
    exchange = backend(host.endpoint, run_id or "x").dial(LONG)
    assert isinstance(exchange, StoreExchange)
    return exchange.of(run_id)


class TestFile:
    def open(self, path: Path | str, **facts: Any) -> C10dBackend:
        return C10dBackend(job(endpoint=str(path), store_type="file", **{"max_nodes": 2} | facts))

    def test_nobody_hosts_and_the_first_coordinates(self, tmp_path: Path) -> None:
        nodes = [self.open(tmp_path / "store") for _ in range(3)]

        assert not any(node.serve(time.monotonic() + LONG) for node in nodes)
        assert [True, False, False] == [node.claim(node.dial(LONG)) for node in nodes]
        assert {"127.0.0.1"} == {node.address() for node in nodes}

    def test_a_file_that_holds_an_ended_job_is_a_clear_error(self, tmp_path: Path) -> None:
        with subprocess.Popen(["true"]) as ended:
            pass
        exchange = self.open(tmp_path / "store").dial(LONG)
        exchange.post(b"1")
        node = self.open(tmp_path / "store")
        assert node.claim(node.dial(LONG))
        exchange.write({"claimant": sign().replace(b"%d " % os.getpid(), b"%d " % ended.pid)})

        late = self.open(tmp_path / "store")

        with pytest.raises(RendezvousClosedError, match="remove that file, or name another one"):
            late.claim(late.dial(LONG))

    @pytest.mark.parametrize("mishap", ["removed", "replaced"])
    def test_a_file_that_vanishes_is_a_lost_store(self, tmp_path: Path, mishap: str) -> None:
        path = tmp_path / "store"
        exchange = self.open(path).dial(LONG)
        if mishap == "removed":
            path.unlink()
        else:
            (tmp_path / "other").touch()
            (tmp_path / "other").rename(path)

        with pytest.raises(RendezvousConnectionError, match="lost the store"):
            exchange.write({"key": b"1"})

    def test_a_file_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file or directory"):
            self.open(tmp_path / "nowhere" / "store").dial(LONG)

    def test_a_job_of_one_node_may_leave_the_file_to_us(self) -> None:
        node = self.open("", max_nodes=1)
        node.dial(LONG).write({"key": b"1"})
        path = Path(node.endpoint)

        assert path.exists()
        node.close()
        assert not path.exists()


def raw(node: C10dBackend) -> Any:
    """torch's own store, as any process that reaches the port may open it."""
    return node.server


def scribble(node: C10dBackend, key: str, value: bytes) -> None:
    """Write what no job wrote, and come back when it is there."""
    raw(node).set(key, value)
    raw(node).check([key])
