"""etcd as it fails in earnest: servers that are dead, frozen, strange or choosy, holders that are killed or paused."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import ConfigError, RendezvousConnectionError, StartError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.stores.etcd._backend import NAMES, EtcdBackend
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer, find_etcd
from elasticlib.rendezvous.stores.etcd._http import Line, Site
from elasticlib.rendezvous.stores.etcd._v3 import V3Keys
from tests.process.launches import children
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

LONG = 30.0
HOLDER = Path(__file__).parents[1] / "scripts" / "etcd_holder.py"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def program() -> None:
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


def backend(endpoint: str, name: str = "etcd-v3", **options: Any) -> EtcdBackend:
    return EtcdBackend(NodeJob(run_id="run", node="n", backend=name, endpoint=endpoint, options=options))


def child_of(pid: int) -> int:
    """The only child, once it is there."""
    wait_until(lambda: children(pid))
    (child,) = children(pid)
    return child


def state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def has_ended(pid: int) -> bool:
    try:
        return state(Path(f"/proc/{pid}/stat")) in "ZX"
    except OSError:
        return True


# reaching a server


def test_nobody_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    with pytest.raises(RendezvousConnectionError, match=rf"http://127\.0\.0\.1:{port} refused the connection"):
        backend(f"127.0.0.1:{port}").dial(LONG)


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"name not found: 'no-such-host\.invalid'"):
        backend("no-such-host.invalid").dial(LONG)


def test_a_listener_that_never_answers_costs_no_more_than_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        began = time.monotonic()

        with pytest.raises(RendezvousConnectionError, match=r"did not answer within 0\.5 s"):
            backend(f"127.0.0.1:{sock.getsockname()[1]}").dial(0.5)
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{"etcdserver": "new"}',
        b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"etcdserver": 1}',
        b"\0" * 100,
    ],
)
def test_server_other_than_etcd_is_reported_as_such(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def serve() -> None:
            connection, _ = sock.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        stranger = threading.Thread(target=serve)
        stranger.start()

        with pytest.raises(RendezvousConnectionError, match="answers, but is not etcd"):
            backend(f"127.0.0.1:{sock.getsockname()[1]}").dial(LONG)
        stranger.join()


def test_the_next_server_of_several_is_taken(server: EtcdServer) -> None:
    reached = backend(f"127.0.0.1:1,{server.get_endpoint()}")

    exchange = reached.dial(LONG)
    exchange.write({"key": b"1"})

    assert [b"1"] == exchange.read(["key"])
    assert "127.0.0.1" == reached.address()
    exchange.close()


def test_nodes_meet_by_whichever_name_of_etcd_each_has(server: EtcdServer) -> None:
    exchanges = [backend(server.get_endpoint(), name).dial(LONG) for name in NAMES]
    exchanges[0].write({"key": b"1"})

    assert [[b"1"]] * len(NAMES) == [exchange.read(["key"]) for exchange in exchanges]
    for exchange in exchanges:
        exchange.close()


def test_the_v3_api_of_etcd_3_3_has_another_path(server: EtcdServer) -> None:
    keys = V3Keys(Line(Site("127.0.0.1", server.get_port(), "127.0.0.1"), LONG), "/v3beta")
    keys.write({"/key": b"1"})
    hold = keys.seize("/leader", "a", 2.0)
    assert hold is not None
    assert keys.renew(hold)
    keys.release(hold)

    items, _ = keys.read(["/key", "/leader"])
    keys.close()

    assert [b"1", None] == [item and item.data for item in items]


# servers that fail


def test_a_dead_server_is_noticed_at_once(server: EtcdServer) -> None:
    exchange = backend(server.get_endpoint()).dial(LONG)
    waiting = exchange.clone()
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(waiting.wait, "key", None)
        exchange.read(["key"])
        server.stop()
        began = time.monotonic()

        with pytest.raises(RendezvousConnectionError, match=r"broke|refused"):
            exchange.write({"key": b"1"})
        with pytest.raises(RendezvousConnectionError, match=r"broke|refused"):
            waiter.result(LONG)
    assert time.monotonic() - began < 5.0


def test_a_frozen_server_costs_no_more_than_the_limit(server: EtcdServer) -> None:
    reached = backend(server.get_endpoint(), read_timeout=0.5)
    exchange = reached.dial(LONG)
    assert server._process is not None
    etcd = child_of(server._process.pid)
    os.kill(etcd, signal.SIGSTOP)
    wait_until(lambda: all(state(path) == "T" for path in Path(f"/proc/{etcd}/task").glob("*/stat")))
    try:
        began = time.monotonic()

        with pytest.raises(RendezvousConnectionError, match=r"did not answer within 0\.5 s"):
            exchange.read(["key"])
        with pytest.raises(RendezvousConnectionError, match="did not answer"):
            reached.dial(0.5)
        assert time.monotonic() - began < 5.0
    finally:
        os.kill(etcd, signal.SIGCONT)
    again = reached.dial(LONG)
    assert [None] == again.read(["key"])
    again.close()


# the private server


def test_a_server_dies_with_the_program_that_started_it() -> None:
    code = (
        "from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer; import sys\n"
        "server = EtcdServer(); server.start(); print(server._process.pid, server._dir, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as program:
        assert program.stdout is not None
        keeper, folder = program.stdout.readline().split()
        etcd = child_of(int(keeper))
        program.kill()

    wait_until(lambda: has_ended(etcd) and has_ended(int(keeper)))
    subprocess.run(["rm", "-r", folder], check=True)


def test_end_of_a_forked_child_leaves_a_server_and_its_data() -> None:
    code = (
        "from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer; import os, sys\n"
        "with EtcdServer() as server:\n"
        "    child = os.fork()\n"
        "    if child == 0: sys.exit(0)\n"
        "    print(os.waitpid(child, 0)[1], os.path.isdir(server._dir), server._answers(), flush=True)\n"
        "print(os.path.isdir(server._dir))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)

    assert ("0 True True False", "") == (" ".join(done.stdout.split()), done.stderr)


def test_a_server_dies_with_its_keeper(server: EtcdServer) -> None:
    assert server._process is not None
    etcd = child_of(server._process.pid)

    server._process.kill()

    wait_until(lambda: has_ended(etcd))


def test_a_server_can_be_started_again_with_its_data(tmp_path: Path) -> None:
    server = EtcdServer(str(tmp_path))
    with server:
        client = server.get_client()
        client.write({"/key": b"1"})
        client.close()
    with server, contextlib.closing(server.get_client()) as client:
        (item,), _ = client.read(["/key"])
    server.stop()

    assert item is not None
    assert b"1" == item.data


@pytest.mark.parametrize(
    ("path", "error", "why"),
    [
        ("/bin/false", StartError, "exit status 1"),
        ("/no/such/etcd", ConfigError, "TORCHELASTIC_ETCD_BINARY_PATH='/no/such/etcd' is not a program"),
    ],
    ids=["no etcd", "missing"],
)
def test_a_wrong_program_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, path: str, error: type[Exception], why: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", path)

    with pytest.raises(error, match=why):
        EtcdServer().start()


# holders


@contextlib.contextmanager
def holder(server: EtcdServer, node: str) -> Iterator[subprocess.Popen[str]]:
    """A process that stands for election, and prints what it is told."""
    command = [sys.executable, str(HOLDER), server.get_endpoint(), node]
    place = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=place) as process:
        try:
            yield process
        finally:
            process.kill()


def next_event(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def save(process: subprocess.Popen[str], text: str) -> Any:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()
    return next_event(process)


def test_a_killed_holder_is_replaced_when_its_lease_ends(server: EtcdServer) -> None:
    with holder(server, "a") as first:
        assert ["elected", None] == next_event(first)
        assert "saved" == save(first, "state of a")
        with holder(server, "b") as second:
            first.kill()
            began = time.monotonic()

            assert ["elected", "state of a"] == next_event(second)
            assert time.monotonic() - began < 2.0 + 3.0


def test_holder_stopped_past_its_lease_changes_nothing_when_it_wakes(server: EtcdServer) -> None:
    with holder(server, "a") as first:
        assert ["elected", None] == next_event(first)
        assert "saved" == save(first, "state of a")
        with holder(server, "b") as second:
            os.kill(first.pid, signal.SIGSTOP)
            assert ["elected", "state of a"] == next_event(second)
            assert "saved" == save(second, "state of b")
            assert first.stdin is not None
            first.stdin.write("late\n")
            first.stdin.flush()
            os.kill(first.pid, signal.SIGCONT)

            assert {"lost", "turned down"} == {next_event(first)[0], next_event(first)[0]}
            assert "saved" == save(second, "next state of b")


# TLS


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    usage = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name, more in (("ca", ()), ("other", ()), ("server", usage), ("client", ())):
        signed = () if name in ("ca", "other") else ("-CA", "ca.pem", "-CAkey", "ca.key")
        openssl(folder, "req", "-x509", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem",
                *more, *signed, *(("-addext", "basicConstraints=critical,CA:FALSE") if signed else ()))  # fmt: skip
    return folder


@pytest.fixture
def secure(certificates: Path, tmp_path: Path) -> Iterator[str]:
    """Endpoint of a server that speaks TLS, and asks for a client's certificate."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(2):
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
    url = f"https://127.0.0.1:{ports[0]}"
    command = [
        *(find_etcd(), "--name", "e", "--data-dir", str(tmp_path)),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", f"http://127.0.0.1:{ports[1]}"),
        *("--initial-advertise-peer-urls", f"http://127.0.0.1:{ports[1]}"),
        *("--initial-cluster", f"e=http://127.0.0.1:{ports[1]}"),
        *("--cert-file", "server.pem", "--key-file", "server.key", "--trusted-ca-file", "ca.pem", "--client-cert-auth"),
    ]
    with subprocess.Popen(command, cwd=certificates, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: _listens(ports[0]))
            yield f"127.0.0.1:{ports[0]}"
        finally:
            server.kill()


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def client(folder: Path, **others: str) -> dict[str, str]:
    files = {"ssl_cert": "client.pem", "ssl_cert_key": "client.key", "ca_cert": "ca.pem"} | others
    return {"protocol": "https"} | {name: str(folder / file) for name, file in files.items()}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_both_sides_show_their_certificates(secure: str, certificates: Path, host: str) -> None:
    reached = backend(f"{host}:{secure.rpartition(':')[2]}", **client(certificates))
    wait_until(lambda: _reaches(reached))

    exchange = reached.dial(LONG)
    waiting = exchange.clone()
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(waiting.wait, "key", LONG)
        exchange.write({"key": b"1"})
        assert waiter.result(LONG)

    assert [b"1"] == waiting.read(["key"])
    for each in (exchange, waiting):
        each.close()


def _reaches(reached: EtcdBackend) -> bool:
    with contextlib.suppress(RendezvousConnectionError):
        reached.dial(1.0).close()
        return True
    return False


def test_each_tls_problem_is_reported_with_its_own_reason(secure: str, certificates: Path, server: EtcdServer) -> None:
    good = backend(secure, **client(certificates))
    wait_until(lambda: _reaches(good))
    troubles = {
        "not trusted .*see ca_cert": backend(secure, **client(certificates, ca_cert="other.pem")),
        "closed without an answer.*see protocol=https": backend(secure),
        "do not agree on TLS .*see protocol=http": backend(server.get_endpoint(), **client(certificates)),
        "do not agree on TLS .*see ssl_cert": backend(secure, protocol="https", ca_cert=str(certificates / "ca.pem")),
    }

    for why, bad in troubles.items():
        with pytest.raises(RendezvousConnectionError) as caught:
            bad.dial(LONG)
        assert re.search(why, str(caught.value))


# torch's store


def test_the_store_that_torch_s_code_knows(server: EtcdServer) -> None:
    from torch.distributed import PrefixStore

    from elasticlib.elastic.rendezvous.etcd_store import EtcdStore

    with contextlib.closing(server.get_client()) as client:
        store = EtcdStore(client, "/a/b", datetime.timedelta(seconds=0.1))
        store.set("key/1", "text")
        store.set("key/2", b"\xff")

        assert b"text" == store.get("key/1")
        assert b"\xff" == store.get("key/2")
        assert store.check(["key/1", "key/2"])
        assert not store.check(["key/1", "key/3"])
        assert [5, 3] == [store.add("n", 5), store.add("n", -2)]
        assert b"3" == store.get("n")
        store.wait(["key/1", "n"])
        with pytest.raises(LookupError, match=r"'key/3' did not appear within 0\.1 s"):
            store.get("key/3")
        with pytest.raises(LookupError):
            store.wait(["key/1", "key/3"], datetime.timedelta(seconds=0.05))
        assert b"text" == PrefixStore("key", store).get("1")


def test_the_store_wakes_who_waits_for_a_key(server: EtcdServer) -> None:
    from elasticlib.elastic.rendezvous.etcd_store import EtcdStore

    with contextlib.closing(server.get_client()) as one, contextlib.closing(server.get_client()) as other:
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(EtcdStore(one, "p").get, "key")
            EtcdStore(other, "p").set("key", b"1")

            assert b"1" == waiter.result(LONG)
