"""
Random schedules of losses and arrivals on real agents, each compared with what the same decisions, simulated, lead to.

A schedule is drawn as a `FaultPlan` and carried out on machines of their own (network namespaces); the simulated
cluster, which runs the real coordinator, is given the very same plan: workers fail, nodes are lost, leave, come, come
and go, sleep with their clocks, or have some of their processes stopped; in half of the schedules a stranger without
the job's token writes into its store all the time, and changes nothing. In the end the size of the world, the restarts
and the end of every agent must be those that were foretold; no two rounds may ever have been at work at once, and
no process may be left. The whole campaign:
``python -m tests.benchmarks.schedules --count 200 --seed 0 --backend both``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import define, field, frozen

from elasticlib.rendezvous.coordinator._places import PAUSES
from elasticlib.testing import Cut, FailWorker, Fault, FaultPlan, Join, Kill, Leave, Pause, Suspend
from tests.benchmarks import tree
from tests.benchmarks.forecast import AHEAD, HEARTBEAT, JOIN_TIMEOUT, LAST_CALL, Draft, Forecast, draft, foretell
from tests.benchmarks.job import new_folder
from tests.hosts._netns import Host, machines, missing
from tests.hosts._team import ETCD_PORT, STORE_PORT, Agent, HungError, Line, Team, dynamic, etcd, stop, team, wake
from tests.shims import built

BACKENDS = ("c10d", "etcd")
RECONNECT_TIMEOUT = 20.0
BLINK, ABSENCE = 0.3, 7.0
"""Seconds without a link that nobody may notice, and those that everybody must."""
_RETURN = 7.0
"""Seconds in which a node whose link is back finds the job again: one attempt to connect may still be under way."""
_PAUSES = PAUSES[-1] * HEARTBEAT
"""Seconds in which a node that came and went a few times has paused for what that costs."""
TOKEN = "of the schedules"
_MORE = 2
"""Machines without an agent at the start."""
_APART = 0.2
"""Seconds between the start of workers and a fault that is to hit them."""
_LIMIT = 90.0
"""Seconds for a state that was foretold to come."""


@frozen
class Outcome:
    """One schedule that was carried out."""

    number: int
    draft: Draft
    plan: FaultPlan
    complaints: tuple[str, ...]
    report: str
    seconds: float


@define(eq=False)
class Schedule:
    """One schedule while it is carried out."""

    draft: Draft
    draw: random.Random
    seed: int
    hosts: tuple[Host, ...]
    job: Team
    clocks: Path
    """A folder with what each agent's clock has missed."""
    shim: dict[str, str]
    """Variable that makes a program load the shim that stops its clock."""
    faults: list[Fault] = field(factory=list)
    agents: dict[int, list[Agent]] = field(factory=dict)
    _began: float = 0.0
    _asleep: set[int] = field(factory=set)
    """Processes that slept once, beside which others may well have begun."""

    def run(self) -> list[str]:
        """Run the schedule; return the deviations from the forecast, if any. Raises `HungError`."""
        for number in range(self.draft.nodes):
            self._start(number)
        self.job.at_work(self.draft.nodes, _LIMIT)
        self._began = time.monotonic() - AHEAD
        for _ in range(self.draft.steps):
            if self.draw.random() < 0.5:
                self._settle()
            else:
                time.sleep(self.draw.uniform(0.0, 1.0))  # the gap between two faults is what is drawn
            if not self._now_foretold().world:
                break
            if not self._strike():
                break
        for host in self.hosts:
            if not self._is_off(host):
                host.heal()
        return self._compare()

    # What is done.

    def _strike(self) -> bool:
        """Do something; whether more may follow."""
        foretold = self._now_foretold()
        kinds: list[Callable[[], bool]] = [self._fail_worker, self._fail_worker, self._lose, self._lose, self._cut]
        kinds += [self._sleep, self._stop, self._flap]
        kinds += [self._join, self._join] if len(foretold.present) <= self.draft.nodes else []  # at most one spare
        return self.draw.choice(kinds)()

    def _fail_worker(self) -> bool:
        self._settle()
        foretold = self._now_foretold()
        if not foretold.world:
            return False
        victim = self.draw.choice(list(self._current(foretold.world).values()))
        self._note(FailWorker(self._number(victim.host), self._at()))
        os.kill(victim.pid, signal.SIGKILL)
        return True

    def _lose(self) -> bool:
        there = self._present()
        # Mostly so that enough are left; what happens when too few are takes long to see.
        if len(there) <= self.draft.min_nodes and self.draw.random() < 0.7:
            return True
        number = self.draw.choice(there)
        agent = self._agent(number)
        how = self.draw.choice(["agent", "machine", "leave"])
        match how:
            case "agent":
                self._note(Kill(number, self._at(), "agent"))
                agent.kill()
            case "machine":
                self._note(Kill(number, self._at()))
                agent.host.cut()
                tree.kill(agent.family())
                agent.process.wait()
            case "leave":
                self._note(Leave(number, self._at()))
                agent.process.send_signal(signal.SIGTERM)
        return not self._hosts_store(number)

    def _cut(self) -> bool:
        number = self.draw.choice(self._present())
        seconds = self.draw.choice([BLINK, ABSENCE])
        if self._hosts_store(number):
            seconds = BLINK  # longer, it ends the job, as losing this machine does
        self._note(Cut(number, self._at(), seconds))
        self.hosts[number].cut()
        time.sleep(seconds)  # this long the link is down
        self.hosts[number].heal()
        if seconds == ABSENCE:
            time.sleep(_RETURN)  # where it becomes a spare, nothing can be seen of it
        return True

    def _sleep(self) -> bool:
        """A machine sleeps, and its clock with it."""
        number = self._dispensable_node()
        if number is None:
            return True
        agent = self._agent(number)
        self._note(Suspend(number, self._at(), ABSENCE))
        began, asleep = time.monotonic_ns(), agent.family()
        self._asleep |= {each.pid for each in asleep}
        stop(asleep)
        time.sleep(ABSENCE)  # this long it sleeps
        clock = self.clocks / str(self.job.agents.index(agent))
        (missed,) = struct.unpack("q", clock.read_bytes())
        clock.write_bytes(struct.pack("q", missed + time.monotonic_ns() - began))
        wake(asleep)
        time.sleep(_RETURN)  # where it becomes a spare, nothing can be seen of it
        return True

    def _stop(self) -> bool:
        """Two processes of a node are stopped while its workers run on."""
        number = self._dispensable_node()
        if number is None:
            return True
        agent = self._agent(number)
        self._note(Pause(number, self._at(), ABSENCE, "agent"))
        self._note(Pause(number, self._at(), ABSENCE, "rendezvous"))
        stopped = agent.parts("rendezvous.sidecar._bridge") | {tree.table()[agent.process.pid]}
        stop(stopped)
        time.sleep(ABSENCE)  # this long they are stopped
        wake(stopped)
        time.sleep(_RETURN)
        return True

    def _flap(self) -> bool:
        """A node comes and goes."""
        number = self._dispensable_node()
        if number is None:
            return True
        for _ in range(self.draw.randint(2, 3)):
            agent = self._agent(number)
            self._note(Leave(number, self._at()))
            agent.process.send_signal(signal.SIGTERM)
            agent.process.wait(_LIMIT)
            self._settle()
            self._connected(number)
            self._note(Join(number, self._at()))
        time.sleep(_PAUSES)  # it pauses before it gets ranks
        return True

    def _dispensable_node(self) -> int | None:
        """A node whose absence ends no job: others are enough, and none of them lives by its store."""
        there = [each for each in self._present() if not self._hosts_store(each)]
        return self.draw.choice(there) if len(there) >= self.draft.min_nodes + 1 else None

    def _agent(self, number: int) -> Agent:
        return next(each for each in self.agents[number] if each.lives)

    def _join(self) -> bool:
        free = sorted(set(range(self.draft.nodes + _MORE)) - set(self._present()))
        number = self.draw.choice(free)
        self.hosts[number].heal()
        self._settle()
        before = self._world()
        self._connected(number)
        self._note(Join(number, self._at()))
        if self._now_foretold().world == before:
            # A spare: nothing can be seen of its Join, which it says as soon as it is connected.
            time.sleep(0.5)
        return True

    def _connected(self, number: int) -> None:
        """Start an agent, wait until it speaks and listens: that takes longer here than in the simulation."""
        port = STORE_PORT if self.draft.backend == "c10d" else ETCD_PORT
        host = self.hosts[number]
        before = host.connections(port)
        agent = self._start(number)
        self.job.wait_for(lambda: host.connections(port) >= before + 2 or not agent.lives, "a new agent to connect")

    def _start(self, number: int) -> Agent:
        clock = self.clocks / str(len(self.job.agents))
        clock.write_bytes(struct.pack("q", 0))
        variables = {**self.shim, "STILL_CLOCK": str(clock), "ELASTICLIB_TOKEN": TOKEN}
        agent = self.job.start(self.hosts[number], variables=variables)
        self.agents.setdefault(number, []).append(agent)
        return agent

    # What is known.

    def _at(self) -> float:
        return time.monotonic() - self._began

    def _note(self, fault: Fault) -> None:
        self.faults.append(fault)

    def _present(self) -> list[int]:
        return sorted(number for number, agents in self.agents.items() if any(each.lives for each in agents))

    def _is_off(self, host: Host) -> bool:
        last = [each for each in self.faults if isinstance(each, (Kill, Join)) and each.node == self._number(host.name)]
        return bool(last) and isinstance(last[-1], Kill) and last[-1].what == "machine"

    def _number(self, name: str) -> int:
        return [host.name for host in self.hosts].index(name)

    def _hosts_store(self, number: int) -> bool:
        return self.draft.backend == "c10d" and number == 0

    def _now_foretold(self) -> Forecast:
        return foretell(self.draft, tuple(self.faults), self.seed)

    def _current(self, world: int) -> dict[int, Line]:
        return self.job.at_work(world, _LIMIT)

    def _world(self) -> int:
        return next((line.world for line in reversed(self.job.lines()) if line.what == "up"), 0)

    def _settle(self) -> None:
        """Wait for what must come of all that was done so far."""
        foretold = self._now_foretold()
        if foretold.world:
            self._current(foretold.world)
            # A loss may come a part of the heartbeat time before it was foretold: what follows must follow in both.
            time.sleep(max(0.0, foretold.settled + _APART - self._at()))

    # What came of it.

    def _compare(self) -> list[str]:
        foretold = self._now_foretold()
        complaints: list[str] = []
        if foretold.world:
            last = self._current(foretold.world)
            restarts = {line.restarts for line in last.values()}
            if restarts != {foretold.restarts}:
                complaints.append(f"{foretold.restarts} restarts were foretold, the workers were told {restarts}")
            self.job.finish()
        self.job.codes(limit=_LIMIT)
        codes = sorted(
            (number, int(agent.process.returncode)) for number, agents in self.agents.items() for agent in agents
        )
        if tuple(codes) != foretold.codes:
            complaints.append(f"machines and exit codes {foretold.codes} were foretold, {tuple(codes)} came")
        complaints += [each for each in self.job.faults() if not any(f"(pid {pid})" in each for pid in self._asleep)]
        complaints += [f"left: {each}" for each in self.job.left()]
        return complaints


@contextmanager
def stranger(host: Host, backend: str, seed: int) -> Iterator[None]:
    """Somebody who has no token, on the machine of the store."""
    port = STORE_PORT if backend == "c10d" else ETCD_PORT
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.jobs.stranger",
        backend,
        f"{host.address}:{port}",
        "job",
        str(seed),
    ]
    process = host.popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def carry_out(number: int, backend: str, seed: int, parent: Path | None = None) -> Outcome:
    """Schedule *number* of those that *seed* means."""
    draw = random.Random(f"{seed}/{backend}/{number}")
    plan = draft(backend, draw)
    began = time.monotonic()
    with ExitStack() as stack:
        hosts = stack.enter_context(machines(plan.nodes + _MORE + 1))
        store = hosts[0] if backend == "c10d" else hosts[-1]
        if backend != "c10d":
            stack.enter_context(etcd(store, parent))
        options = dynamic(
            backend,
            store,
            f"{plan.min_nodes}:{plan.nodes}",
            heartbeat_timeout=f"{HEARTBEAT:g}",
            last_call_timeout=f"{LAST_CALL:g}",
            join_timeout=f"{JOIN_TIMEOUT:g}",
            reconnect_timeout=f"{RECONNECT_TIMEOUT:g}",
        )
        job = stack.enter_context(team(*options, f"--max-restarts={plan.max_restarts}", parent=parent))
        clocks = stack.enter_context(new_folder(parent))
        if plan.stranger:
            stack.enter_context(stranger(store, backend, draw.randrange(2**32)))
        schedule = Schedule(plan, draw, seed, hosts, job, clocks, built("still_clock", clocks))
        try:
            complaints = schedule.run()
        except HungError as error:
            complaints = [str(error).partition(":\n")[0]]
        report = job.report() if complaints else ""
    return Outcome(number, plan, FaultPlan(schedule.faults), tuple(complaints), report, time.monotonic() - began)


def campaign(
    count: int, seed: int, backend: str, side_by_side: int = 1, report: Callable[[str], object] | None = None
) -> list[Outcome]:
    """Carry out *count* schedules, *side_by_side* at once; *report* gets each. Those that did not go as foretold."""
    bad: list[Outcome] = []
    with new_folder() as folder, ThreadPoolExecutor(side_by_side) as pool:
        for outcome in pool.map(lambda number: carry_out(number, backend, seed, folder), range(count)):
            if outcome.complaints:
                bad.append(outcome)
            if report is not None:
                end = "; ".join(outcome.complaints) or "as foretold"
                what = f"{outcome.draft} {outcome.plan}"
                report(f"{backend} {outcome.number + 1}/{count}: {what}: {end}, {outcome.seconds:.0f} s")
                if outcome.report:
                    report(outcome.report)
    return bad


def main() -> int:
    """The campaign as a command: 0 when all schedules ended as foretold."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.schedules", description=main.__doc__)
    parser.add_argument("--count", type=int, default=200, help="schedules of each backend (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=[*BACKENDS, "both"], default="both")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="schedules at a time (1)")
    options = parser.parse_args()
    if why := missing():
        parser.error(why)
    results = Counter[str]()
    for backend in BACKENDS if options.backend == "both" else (options.backend,):
        bad = campaign(
            options.count,
            options.seed,
            backend,
            options.side_by_side,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
        results["bad"] += len(bad)
        print(f"{backend}: {options.count - len(bad)} of {options.count} as foretold (seed {options.seed})", flush=True)
    return 1 if results["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
