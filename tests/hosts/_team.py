"""
One job of many agents, each on a machine of its own, and the journal that its workers keep.

Rules of this file: what a test waits for comes within a limit or raises; leaving the ``with`` block kills what is
left of the job, one process at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from tests.benchmarks import tree
from tests.benchmarks.job import environment, new_folder
from tests.benchmarks.launchers import ELASTICLIB, Launcher
from tests.hosts._netns import Host

WORKER = Path(__file__).with_name("worker.py")
LIMIT = 60.0
"""Seconds after which a step counts as hung."""
STORE_PORT = 29400
ETCD_PORT = 2379


@frozen
class Line:
    """One line of the journal, in the order of writing."""

    what: str
    """``up``, ``told`` (to end), ``done``, or ``beside``: at work at the same time as another round."""
    at: float
    """Monotonic seconds."""
    round: str
    rank: int
    world: int
    restarts: int
    host: str
    pid: int
    other: str = ""
    other_pid: int = 0


@define(eq=False)
class Agent:
    """One agent, on one machine."""

    host: Host
    process: subprocess.Popen[bytes]
    complaints_at: Path

    @property
    def complaints(self) -> str:
        """Return the agent's stderr."""
        return self.complaints_at.read_text(errors="replace")

    @property
    def lives(self) -> bool:
        """Return whether the launcher still runs."""
        return self.process.poll() is None

    def family(self) -> frozenset[tree.Process]:
        """The launcher and all that descends from it."""
        processes = tree.table()
        return frozenset(processes[pid] for pid in tree.descendants([self.process.pid], processes))

    def parts(self, *names: str) -> frozenset[tree.Process]:
        """The processes below the launcher whose command line holds one of *names*."""
        return frozenset(
            each
            for each in self.family()
            if each.pid != self.process.pid and any(name in tree.command(each.pid) for name in names)
        )

    def kill(self) -> None:
        """SIGKILL the launcher."""
        self.process.kill()
        self.process.wait()


class HungError(AssertionError):
    """Error for an expected event that did not happen in time."""


@define(eq=False)
class Team:
    """A job at work."""

    folder: Path
    command: tuple[str, ...]
    """The launcher's command line with the options that all agents are given."""
    arguments: tuple[str, ...] = ()
    """Of the worker."""
    agents: list[Agent] = field(factory=list)

    def start(self, host: Host, *options: str, variables: Mapping[str, str] | None = None) -> Agent:
        """Start an agent on *host*, with more *options* and *variables*."""
        path = self.folder / f"stderr{len(self.agents)}"
        with open(path, "wb") as stderr:
            process = host.popen(
                [*self.command, f"--local-addr={host.address}", *options, str(WORKER), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment(self.folder, variables),
                start_new_session=True,
            )
        agent = Agent(host, process, path)
        self.agents.append(agent)
        return agent

    def lines(self) -> list[Line]:
        """The journal so far."""
        try:
            text = (self.folder / "lines").read_text()
        except FileNotFoundError:
            return []
        return [Line(**json.loads(line)) for line in text.splitlines()]

    def at_work(self, count: int, limit: float = LIMIT, after: str = "") -> dict[int, Line]:
        """
        Wait until the last round has *count* workers, all alive, and is not the round *after*.

        Their lines by rank. Raises `HungError` when they do not come.
        """
        found: dict[int, Line] = {}

        def settled() -> bool:
            nonlocal found
            up = [line for line in self.lines() if line.what == "up"]
            found = {line.rank: line for line in up if line.round == up[-1].round}
            return (
                len(found) == count
                and up[-1].world == count
                and up[-1].round != after
                and all(tree.command(line.pid) for line in found.values())
            )

        self.wait_for(settled, f"{count} workers at work", limit)
        return found

    def wait_for(self, condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
        """Wait until *condition* holds. Raises `HungError` when it does not within *limit* seconds."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                raise HungError(f"waited {limit:g} s in vain for {what}:\n{self.report()}")
            time.sleep(0.01)

    def finish(self) -> None:
        """Let all workers end well, and those that come later too."""
        (self.folder / "finish").touch()

    def codes(self, *agents: Agent, limit: float = LIMIT) -> list[int | None]:
        """Wait for the ends of *agents* (all if none is given); their exit codes."""
        chosen = agents or tuple(self.agents)
        self.wait_for(lambda: all(each.process.poll() is not None for each in chosen), "all agents to end", limit)
        return [each.process.returncode for each in chosen]

    def left(self, limit: float = 6.0) -> list[str]:
        """Command lines of what is alive *limit* seconds from now, though all agents have ended."""
        return sorted(tree.command(each.pid) for each in tree.left_after(limit, (), self.folder))

    def faults(self) -> list[str]:
        """Return violations in the journal: two rounds at work at once, or a rank given twice."""
        lines = self.lines()
        found = [
            f"round {each.round} rank {each.rank} on {each.host} began beside {each.other} (pid {each.other_pid})"
            for each in lines
            if each.what == "beside"
        ]
        places: dict[tuple[str, int], int] = {}
        for each in lines:
            first = places.setdefault((each.round, each.rank), each.pid)
            if first != each.pid:
                found.append(f"rank {each.rank} of round {each.round} was given to pids {first} and {each.pid}")
        return found

    def report(self, most: int = 3000) -> str:
        """All that helps to understand what happened."""
        agents = [
            f"--- agent {number} on {each.host.name}, exit code {each.process.poll()}:\n{each.complaints[-most:]}"
            for number, each in enumerate(self.agents)
        ]
        lines = [f"{each.at:.3f} {each.what} {each.round} rank {each.rank} {each.host}" for each in self.lines()[-40:]]
        return "\n".join([*agents, "--- journal:", *lines])


@contextmanager
def team(
    *options: str, worker: Sequence[str] = (), launcher: Launcher = ELASTICLIB, parent: Path | None = None
) -> Iterator[Team]:
    """A job whose agents all get *options*, with nobody in it yet."""
    own = ("--preload", "") if launcher is ELASTICLIB else ()
    with new_folder(parent) as folder:
        job = Team(folder, (*launcher.command, "--nproc-per-node=1", *own, *options), tuple(worker))
        try:
            yield job
        finally:
            tree.kill_all(tree.of_job(None, folder), folder)
            for agent in job.agents:
                agent.process.wait()


def dynamic(backend: str, host: Host, nodes: str, run_id: str = "job", **conf: Any) -> list[str]:
    """Options of a job of *nodes* (``MIN:MAX``) that meets at *host* (c10d), or on the etcd there."""
    port = STORE_PORT if backend == "c10d" else ETCD_PORT
    settings = ",".join(f"{name}={value}" for name, value in conf.items())
    return [
        f"--nnodes={nodes}",
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={host.address}:{port}",
        f"--rdzv-id={run_id}",
        *([f"--rdzv-conf={settings}"] if settings else []),
    ]


@contextmanager
def met(hosts: Sequence[Host], backend: str, nodes: str, *, stubborn: bool = False, **conf: Any) -> Iterator[Team]:
    """A job with three restarts that meets on the first of *hosts* (c10d), or on an etcd on the last one."""
    with ExitStack() as stack:
        place = hosts[0] if backend == "c10d" else hosts[-1]
        if backend != "c10d":
            stack.enter_context(etcd(place))
        limits = ("--max-restarts=3", "--shutdown-timeout=2")
        worker = ["stubborn"] if stubborn else []
        yield stack.enter_context(team(*dynamic(backend, place, nodes, **conf), *limits, worker=worker))


@contextmanager
def etcd(host: Host, parent: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """An etcd server on *host*, with both of its interfaces, that answers."""
    with new_folder(parent) as folder, open(folder / "log", "wb") as log:
        here = f"http://{host.address}:{ETCD_PORT}"
        peers = f"http://{host.address}:{ETCD_PORT + 1}"
        command = ["etcd", "--name=e1", f"--data-dir={folder}/data", f"--initial-cluster=e1={peers}"]
        client = [f"--listen-client-urls={here}", f"--advertise-client-urls={here}"]
        peer = [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        server = host.popen([*command, *client, *peer], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            ask(host, f"{here}/version", limit=30.0)
            yield server
        finally:
            server.kill()
            server.wait()


def ask(host: Host, url: str, body: Mapping[str, Any] | None = None, limit: float = 10.0) -> Any:
    """Send a JSON *body* from *host* to the server at *url* until it answers; return the answer."""
    program = (
        "import sys, urllib.request as r; "
        "data = sys.argv[2].encode() or None; print(r.urlopen(sys.argv[1], data, 2).read().decode())"
    )
    sent = json.dumps(body) if body is not None else ""
    deadline = time.monotonic() + limit
    while True:
        done = subprocess.run(host.entered(sys.executable, "-c", program, url, sent), capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout)
        if time.monotonic() > deadline:
            raise HungError(f"{url} does not answer: {done.stderr[-300:]}")
        time.sleep(0.05)


def stop(processes: frozenset[tree.Process]) -> None:
    """SIGSTOP *processes*."""
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGSTOP)


def wake(processes: frozenset[tree.Process]) -> None:
    """SIGCONT *processes*."""
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGCONT)
