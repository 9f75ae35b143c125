"""Rows 146 to 156, and 160: the stores by which nodes meet, by handlers in this process and by agents."""

from __future__ import annotations

import contextlib
import pathlib
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from tests.checklist.nodes import LOOPBACK, Cluster
from tests.checklist.peers import REPORT, ROOT, Peer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

LIMIT = 60.0
"""Seconds within which handlers that need not wait for anything have met, on a loaded machine too."""
NOT_OURS = "192.0.2.1"
"""An address that is kept for examples (RFC 5737)."""


class Handlers:
    """Handlers of this process, which are all shut down in the end."""

    def __init__(self, peer: Peer) -> None:
        self._parameters = peer.module("rendezvous").RendezvousParameters
        self._make = peer.module("rendezvous.registry").get_rendezvous_handler
        self._pool = ThreadPoolExecutor()
        self.made: list[Any] = []

    def make(self, endpoint: str, nodes: int = 1, run_id: str = "job", backend: str = "c10d", **options: Any) -> Any:
        """A handler of a job of *nodes* nodes."""
        handler = self._make(self._parameters(backend, endpoint, run_id, nodes, nodes, LOOPBACK, **options))
        self.made.append(handler)
        return handler

    def enter(self, endpoint: str, *arguments: Any, **options: Any) -> Any:
        """Make a handler and get its place in a round."""
        return self.make(endpoint, *arguments, **options).next_rendezvous()

    def start(self, *arguments: Any, **options: Any) -> Future[Any]:
        """`enter` in a thread of its own."""
        return self._pool.submit(self.enter, *arguments, **options)

    def close(self) -> None:
        """Shut them down together: a host waits until the others know."""
        for ending in [self._pool.submit(handler.shutdown) for handler in self.made]:
            with contextlib.suppress(Exception):
                ending.result(LIMIT)
        self._pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def handlers(peer: Peer) -> Iterator[Handlers]:
    """Makes handlers of the peer."""
    made = Handlers(peer)
    yield made
    made.close()


def places(infos: Sequence[Any]) -> list[tuple[int, int]]:
    """Rank and world size of each."""
    return [(info.rank, info.world_size) for info in infos]


@pytest.mark.row(146)
def test_the_node_at_the_endpoint_hosts_the_store(peer: Peer, handlers: Handlers) -> None:
    """A lone node has its round where the endpoint is this machine, by any of its names, and nowhere else."""
    own_names = ("localhost", LOOPBACK, socket.gethostname(), socket.gethostbyname(socket.gethostname()))
    hosts = [handlers.start(f"{name}:{free_port()}") for name in own_names]
    client = handlers.start(f"{NOT_OURS}:{free_port()}", join_timeout=6, read_timeout=2)

    assert [(0, 1)] * 4 == places([host.result(LIMIT) for host in hosts])
    with pytest.raises(peer.module("rendezvous").RendezvousConnectionError):
        client.result(LIMIT)


@pytest.mark.row(147)
def test_the_option_is_host_decides_who_hosts(peer: Peer, handlers: Handlers) -> None:
    """Also where the endpoint says otherwise: torch takes 0.0.0.0 for another machine, and localhost for this one."""
    host = handlers.start(f"0.0.0.0:{free_port()}", is_host="1")
    client = handlers.start(f"localhost:{free_port()}", is_host="0", join_timeout=6, read_timeout=2)

    assert [(0, 1)] == places([host.result(LIMIT)])
    with pytest.raises(peer.module("rendezvous").RendezvousConnectionError):
        client.result(LIMIT)
    with pytest.raises(ValueError, match="is_host"):
        handlers.enter(f"localhost:{free_port()}", is_host="maybe")


@pytest.mark.row(148)
def test_the_second_agent_of_a_machine_is_a_client_of_the_firsts_store(peer: Peer, handlers: Handlers) -> None:
    with Cluster(peer) as cluster:
        first = cluster.node("2", is_host=None)
        first.send("next")
        second = handlers.start(cluster.endpoint, 2)

        assert [(0, 2), (1, 2)] == sorted([tuple(first.answer()[:2]), *places([second.result(LIMIT)])])


@pytest.mark.row(149)
def test_port_0_is_a_free_port(handlers: Handlers) -> None:
    """Two jobs of one name at port 0 know nothing of each other: each has a port of its own."""
    jobs = [handlers.start("localhost:0") for _ in range(2)]

    assert [(0, 1)] * 2 == places([job.result(LIMIT) for job in jobs])


@pytest.mark.row(150)
def test_nodes_meet_in_a_file(handlers: Handlers, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "store"
    nodes = [handlers.start(str(path), 2, store_type="file") for _ in range(2)]

    assert [(0, 2), (1, 2)] == sorted(places([node.result(LIMIT) for node in nodes]))
    assert path.exists()
    with pytest.raises(ValueError, match=r"(?i)store.type"):
        handlers.enter(f"localhost:{free_port()}", store_type="dbm")


@pytest.mark.row(151)
@pytest.mark.parametrize("seconds", [0, -1])
def test_a_read_timeout_that_is_not_above_0_is_refused(handlers: Handlers, seconds: int) -> None:
    with pytest.raises(ValueError, match=r"read.timeout"):
        handlers.enter(f"localhost:{free_port()}", read_timeout=seconds)


@pytest.mark.row(151)
@pytest.mark.parametrize("seconds", [0, -1])
def test_read_timeout_has_no_effect_on_a_file_store(handlers: Handlers, tmp_path: pathlib.Path, seconds: int) -> None:
    info = handlers.enter(str(tmp_path / "store"), store_type="file", read_timeout=seconds)

    assert [(0, 1)] == places([info])


@pytest.mark.row(151)
@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 60),
        ({"read_timeout": 7}, 7),
        ({"store_type": "file"}, 300),
        ({"store_type": "file", "read_timeout": 7}, 300),
        ({"backend": "static", "rank": 0}, 600),
        ({"backend": "static", "rank": 0, "timeout": 9}, 9),
    ],
    ids=str,
)
def test_store_of_a_round_waits_for_a_key_as_long_as_its_backend_sets(
    handlers: Handlers, tmp_path: pathlib.Path, options: dict[str, Any], seconds: int
) -> None:
    endpoint = str(tmp_path / "store") if "store_type" in options else f"localhost:{free_port()}"
    info = handlers.enter(endpoint, **options)

    assert info.store.timeout.total_seconds() == seconds


@pytest.mark.row(146)
@pytest.mark.parametrize("name", ["LOCALHOST", "[localhost]", "127.1", "0x7f.0.0.1", "[::1]"])
def test_this_machine_is_known_by_any_spelling_of_localhost(handlers: Handlers, name: str) -> None:
    info = handlers.enter(f"{name}:{free_port()}", join_timeout=6, read_timeout=2)

    assert [(0, 1)] == places([info])


@pytest.mark.row(152, improvement=True)
def test_client_waits_for_a_store_that_starts_after_the_read_timeout(handlers: Handlers) -> None:
    endpoint = f"{LOOPBACK}:{free_port()}"
    client = handlers.start(endpoint, 2, is_host="0", read_timeout=2, join_timeout=LIMIT)
    wait([client], timeout=5)  # twice the read timeout, unless it gives up before

    host = handlers.start(endpoint, 2, is_host="1", join_timeout=LIMIT)

    assert [(0, 2), (1, 2)] == sorted(places([node.result(LIMIT) for node in (client, host)]))


@pytest.mark.row(153)
def test_jobs_with_different_ids_are_apart_on_one_endpoint(handlers: Handlers) -> None:
    endpoint = f"{LOOPBACK}:{free_port()}"
    one, other = (handlers.enter(endpoint, 1, run_id) for run_id in ("one", "other"))

    assert [(0, 1)] * 2 == places([one, other])
    one.store.set("key", "one's")
    assert one.store.check(["key"])
    assert not other.store.check(["key"])


@pytest.mark.row(154)
def test_static_nodes_have_the_ranks_they_were_given_and_rank_0_hosts(handlers: Handlers) -> None:
    alone = handlers.start(f"{LOOPBACK}:{free_port()}", 2, backend="static", rank=1, timeout=2)
    endpoint = f"{LOOPBACK}:{free_port()}"
    nodes = [handlers.start(endpoint, 2, backend="static", rank=rank, timeout=LIMIT) for rank in (1, 0)]

    infos = [node.result(LIMIT) for node in nodes]
    assert [(1, 2), (0, 2)] == places(infos)
    infos[0].store.set("key", "value")
    assert b"value" == infos[1].store.get("key")
    with pytest.raises((RuntimeError, OSError)):
        alone.result(LIMIT)


@pytest.mark.row(155, improvement=True)
def test_static_peers_restart_their_workers_when_one_node_restarts(peer: Peer) -> None:
    """Node 1's worker fails once, when node 0's runs, and that one is started again too."""
    script = peer.script(
        "import os, sys, time\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "open(f\"ran.{os.environ['RANK']}.{attempt}\", 'w').close()\n"
        "while not os.path.exists('ran.0.0'): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1' and not attempt: sys.exit(1)\n"
        "while not (os.path.exists('ran.0.1') and os.path.exists('ran.1.1')): time.sleep(0.01)\n"
    )
    options = ("--nnodes", "2", "--master-addr", LOOPBACK, "--master-port", str(free_port()), "--max-restarts", "1")
    agents = [peer.start(*options, "--node-rank", str(rank), script) for rank in range(2)]

    for path, limit in ((peer.folder / "ran.1.0", LIMIT), (peer.folder / "ran.0.1", LIMIT / 2)):
        peer.wait_until(lambda wanted=path: wanted.exists() or all(agent.poll() is not None for agent in agents), limit)
        assert path.exists()
    assert [0, 0] == [peer.finish(agent).returncode for agent in agents]


@pytest.mark.row(155)
def test_a_static_node_needs_a_rank_waits_for_nobody_and_is_never_closed(handlers: Handlers) -> None:
    endpoint = f"{LOOPBACK}:{free_port()}"
    with pytest.raises(ValueError, match="rank"):
        handlers.enter(endpoint, backend="static")
    node = handlers.make(endpoint, backend="static", rank=0)

    assert [(0, 1)] == places([node.next_rendezvous()])
    assert 0 == node.num_nodes_waiting()
    node.set_closed()
    assert node.is_closed() is False


@pytest.mark.row(156, improvement=True)
def test_the_workers_of_a_static_restart_find_no_keys_of_those_before(peer: Peer) -> None:
    script = peer.script(
        "import os, sys\n"
        "from torch.distributed import TCPStore\n"
        "where, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "store = TCPStore(where, port, is_master=False, wait_for_workers=False)\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "open(f'found.{attempt}', 'w').write(str(store.check(['key'])))\n"
        "store.set('key', 'value')\n"
        "assert store.check(['key'])\n"
        "sys.exit(1 - attempt)\n"
    )

    done = peer.run("--nnodes", "1", "--master-port", str(free_port()), "--max-restarts", "1", script)

    assert 0 == done.returncode, done.err
    assert ["False", "False"] == [(peer.folder / f"found.{attempt}").read_text() for attempt in range(2)]


PLUG_IN = """
from {elastic}.rendezvous import RendezvousHandler, RendezvousParameters
from {elastic}.rendezvous.registry import get_rendezvous_handler


class Mine(RendezvousHandler):
    def __init__(self, params):
        given = (params.run_id, params.min_nodes, params.max_nodes, params.local_addr)
        self.inner = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", *given))

    def get_backend(self):
        return "mine"

    @property
    def use_agent_store(self):
        return self.inner.use_agent_store

    def next_rendezvous(self):
        open("used", "w").close()
        return self.inner.next_rendezvous()

    def is_closed(self):
        return self.inner.is_closed()

    def set_closed(self):
        self.inner.set_closed()

    def num_nodes_waiting(self):
        return self.inner.num_nodes_waiting()

    def get_run_id(self):
        return self.inner.get_run_id()

    def shutdown(self):
        return self.inner.shutdown()


def creator():
    return Mine
"""


@pytest.mark.row(160)
def test_handler_plug_in_is_found_beside_a_broken_one(peer: Peer) -> None:
    peer.script(PLUG_IN, "my_plug_in.py")
    peer.script("Metadata-Version: 2.1\nName: mine\nVersion: 1\n", "mine-1.dist-info/METADATA")
    entries = "[torchrun.handlers]\nshattered = no_such_module:creator\nmine = my_plug_in:creator\n"
    peer.script(entries, "mine-1.dist-info/entry_points.txt")
    script, path = peer.script(REPORT), {"PYTHONPATH": f"{ROOT}:{peer.folder}"}

    done = peer.run("--rdzv-backend", "mine", "--rdzv-endpoint", "anywhere:1", "--rdzv-id", "job", script, env=path)

    assert 0 == done.returncode, done.err
    assert (peer.folder / "used").exists()
    assert ["job"] == [seen.env["TORCHELASTIC_RUN_ID"] for seen in peer.reports()]
    assert "shattered" in done.err
