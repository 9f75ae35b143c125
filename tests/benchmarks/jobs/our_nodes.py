"""
Several nodes of a c10d job in one process, each with a member and connections of its own.

Usage: ``python -m tests.benchmarks.jobs.our_nodes ENDPOINT TOTAL FIRST COUNT``: nodes FIRST to FIRST + COUNT - 1 of
TOTAL; with COUNT 0 the process hosts the store and coordinates. Each line on stdin is a command, and a line on stdout
answers it: ``connect``; ``form``: all ask for the first round; ``again NODE``: a worker of node NODE fails, and all
that are told so ask for the next round. The answer is JSON: when the first asked, when the last was
in, and all ranks (or numbers, before there are ranks).
"""

import json
import selectors
import sys
import time

import torch.distributed  # noqa: F401  (its import is no part of what is timed)

from elasticlib.rendezvous._contact import Limits
from elasticlib.rendezvous._host import Host
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous._member import Member
from elasticlib.rendezvous._messages import ContactLost, FailureNote, Final, RoundEnd, Seat
from elasticlib.rendezvous._offer import BoundOffer
from elasticlib.rendezvous.c10d import C10dBackend

_TICK = 0.2
_FAILURE = FailureNote(rank=0, local_rank=0, pid=1, exitcode=1)


class Nodes:
    """All nodes of this process, driven by one thread as an agent drives its own."""

    def __init__(self, job: Job, first: int, count: int) -> None:
        self._job = job
        self._numbers = range(first, first + count)
        self._members: dict[int, Member] = {}
        self._selector = selectors.DefaultSelector()

    def connect(self) -> list[tuple[float, int]]:
        """Seek the job; when each was in contact with it, and its number."""
        for number in self._numbers:
            backend = C10dBackend(self._job)
            member = Member(
                backend.dial,
                f"node{number}/1-{number:08x}",
                BoundOffer(),
                run_id=self._job.run_id,
                terms=self._job.terms,
                limits=Limits(),
            ).start()
            self._members[number] = member
            self._selector.register(member.fileno(), selectors.EVENT_READ, member)
        numbers = {member: number for number, member in self._members.items()}
        found: dict[int, float] = {}
        while len(found) < len(self._members):
            for key, _ in self._selector.select(_TICK):
                key.data.take()
                if key.data._contact.live:
                    found.setdefault(numbers[key.data], time.monotonic())
        return [(at, number) for number, at in found.items()]

    def form(self) -> list[tuple[float, int]]:
        """All ask for a seat; when each had it, and its rank."""
        for member in self._members.values():
            member.join(1, "default")
        return self._seated()

    def again(self, node: int) -> list[tuple[float, int]]:
        """A worker of *node* fails, which may live in another process."""
        failed = self._members.get(node)
        if failed is not None:
            assert failed.round is not None
            failed.failed(failed.round, (_FAILURE,))
        return self._seated()

    def close(self) -> None:
        """End all connections."""
        for member in self._members.values():
            member.close()

    def _seated(self) -> list[tuple[float, int]]:
        found: list[tuple[float, int]] = []
        tick = time.monotonic() + _TICK
        while len(found) < len(self._members):
            ready = [key.data for key, _ in self._selector.select(_TICK)]
            if time.monotonic() >= tick:
                ready, tick = list(self._members.values()), time.monotonic() + _TICK
            for member in ready:
                found += self._hear(member)
        return found

    def _hear(self, member: Member) -> list[tuple[float, int]]:
        found: list[tuple[float, int]] = []
        for word in member.take():
            match word:
                case Seat():
                    found.append((time.monotonic(), word.group_rank))
                case RoundEnd():
                    member.stopped(word.round)
                    member.join(1, "default")
                case ContactLost():  # a thousand members share this process: some may get no turn for seconds
                    member.join(1, "default")
                case Final():
                    raise SystemExit(f"the job ended: {word.why}")
        return found


def main() -> None:
    """Do what stdin says until it ends."""
    endpoint, total, first, count = sys.argv[1], *map(int, sys.argv[2:])
    job = Job(
        run_id="forming",
        node=f"host/1-{first:08x}",
        backend="c10d",
        endpoint=endpoint,
        min_nodes=total,
        max_nodes=total,
        is_host=count == 0,
    )
    if count == 0:
        backend = C10dBackend(job)
        backend.serve(time.monotonic() + 60)
        host = Host(backend.dial(10.0), job.rules, run_id=job.run_id, name=job.node)
        host.start()
    nodes = Nodes(job, first, count)
    for line in sys.stdin:
        began = time.monotonic()
        found: list[tuple[float, int]] = []
        match line.split():
            case ["connect"]:
                found = nodes.connect()
            case ["form"]:
                found = nodes.form()
            case ["again", node]:
                found = nodes.again(int(node))
        answer = {"began": began, "done": max((at for at, _ in found), default=0.0), "ranks": [r for _, r in found]}
        print(json.dumps(answer), flush=True)
    nodes.close()


if __name__ == "__main__":
    main()
