"""A stranger who writes into the store of a real job: one line in the log, and the job goes on."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, Exchange
from elasticlib.rendezvous.protocol._messages import Close, Descriptor, Envelope, Join, encode
from elasticlib.rendezvous.stores._c10d import C10dBackend
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer, find_etcd
from tests.process.launches import Program, environment, free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

LIMIT = 100.0
BACKENDS = ["c10d", "etcd"]
ESC = "\x1b"


def envelope(**changes: Any) -> bytes:
    """A message that would be a good one, but for these parts."""
    body = json.loads(encode(Envelope(1, Join("stranger/1", Descriptor(1, "trainer", ("10.0.0.1",), 1)))))
    for place, value in changes.items():
        part = body
        *way, last = place.split("__")
        for each in way:
            part = part[each]
        part[last] = value
    return json.dumps(body).encode()


UNREADABLE = (
    envelope(seq=7).replace(b'"seq": 7', b'"seq": 1e999'),
    envelope(seq=10**400),
    envelope(report__node="\ud800/1"),
    envelope(report__node=f"{ESC}[2J/1"),
    envelope(report__descriptor__slots=10**30),
    envelope(report__descriptor__store_port=1e308),
    b"[" * 100_000,
    b'{"v":1,"type":"letter","seq":1,"report":' + b'{"a":' * 5000,
    b"\xff\xfe\x00",
)


class Cluster:
    """Nodes of one job, as commands, and a connection to its store that is nobody's."""

    def __init__(self, folder: pathlib.Path, backend: str, endpoint: str, token: str = "") -> None:
        self.folder, self.backend, self.endpoint, self.token = folder, backend, endpoint, token
        self.nodes: list[Program] = []
        (folder / "work.py").write_text(
            "import os, time\nopen('up' + os.environ['RANK'], 'w').close()\n"
            "while not os.path.exists('go'):\n    time.sleep(0.01)\n"
        )

    def start(self) -> None:
        variables = environment(ELASTICLIB_TOKEN=self.token)
        for name in ("LOGLEVEL", "PET_RDZV_ID"):
            variables.pop(name, None)
        options = ("--nnodes", "2", "--rdzv-id", "job7", "--rdzv-backend", self.backend, "--preload", "")
        command = ("-m", "elasticlib.run", *options, "--rdzv-endpoint", self.endpoint, "work.py")
        self.nodes.append(Program(*command, cwd=self.folder, env=variables))

    def break_in(self) -> Exchange:
        """A connection of somebody else, once the job greets."""
        job = NodeJob(run_id="job7", node="x", backend=self.backend, endpoint=self.endpoint, is_host=False)
        own = C10dBackend(job) if self.backend == "c10d" else EtcdBackend(job)
        dialled: list[Exchange] = []

        def greets() -> bool:
            with contextlib.suppress(Exception):
                dialled.append(own.dial(5.0))
                return dialled[-1].wait(ANNOUNCEMENT, 5.0)
            return False

        wait_until(greets, LIMIT)
        return dialled[-1]

    def end(self) -> list[tuple[int, str]]:
        """Let the workers end; the status and output of each node."""
        (self.folder / "go").touch()
        return [node.ends(LIMIT) for node in self.nodes]

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Iterator[Callable[..., Cluster]]:
    with contextlib.ExitStack() as stack:

        def new(backend: str, token: str = "") -> Cluster:
            if backend == "c10d":
                endpoint = f"127.0.0.1:{free_port()}"
            else:
                try:
                    find_etcd()
                except ConfigError as error:
                    pytest.skip(str(error))
                endpoint = stack.enter_context(EtcdServer()).get_endpoint()
            made = Cluster(tmp_path, backend, endpoint, token)
            stack.callback(made.close)
            return made

        yield new


@pytest.mark.parametrize("token", ["", "s3cret"], ids=["open", "signed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_unreadable_entries_are_refused_in_few_lines_and_job_continues(
    make: Callable[..., Cluster], backend: str, token: str
) -> None:
    cluster = make(backend, token)
    cluster.start()
    stranger = cluster.break_in()
    for entry in UNREADABLE * 5:
        stranger.post(entry)
    stranger.close()
    cluster.start()

    ends = cluster.end()

    assert [0, 0] == [status for status, _ in ends], ends
    output = "".join(err for _, err in ends)
    assert 1 <= output.count("a report was refused") <= 6, output
    assert ESC not in output


@pytest.mark.parametrize("backend", BACKENDS)
def test_strangers_text_is_shown_without_effect_on_a_terminal(make: Callable[..., Cluster], backend: str) -> None:
    """Without a token he may end the job by his word; no line of the log is made by him, and nothing is cleared."""
    cluster = make(backend)
    cluster.start()
    stranger = cluster.break_in()
    offer = Descriptor(1, f"role{ESC}c", (f"{ESC}[2J",), 1, work=f"{ESC}]0;title\x07")
    stranger.post(encode(Envelope(1, Join("stranger/1", offer))))
    stranger.post(encode(Envelope(2, Close("stranger/1", f"{ESC}[31mended\nforged: all is well\r\x9b2J\u202e"))))
    stranger.close()

    ((status, output),) = cluster.end()

    assert 1 == status
    assert r"\x1b[31mended\nforged: all is well\r\x9b2J\u202e" in output
    assert not [line for line in output.splitlines() if line.startswith("forged")]
    assert {"\n"} >= {part for part in output if not part.isprintable()}
