"""
One node of a job, as an agent would be, with a process that sleeps for its workers; says as JSON what it hears.

Its argument is its part in the job as JSON. At each seat it starts its sleeper and has it guarded; when its
contact is lost it asks for another seat.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from elasticlib import processes
from elasticlib.errors import RendezvousError
from elasticlib.processes._wire import Channel, wait_readable
from elasticlib.rendezvous import ContactLost, Final, RankAssignment, RoundEnd
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._messages import Stopped
from elasticlib.rendezvous.sidecar._sidecar_client import SidecarClient

SLEEPER = """
import sys, time
from elasticlib import processes
from elasticlib.processes._wire import Channel
with processes.own_descriptors() as itself:
    Channel.adopt(int(sys.argv[1])).send({}, itself)
time.sleep(60)
"""

member = SidecarClient(NodeJob(**json.loads(sys.argv[1])))
workers: subprocess.Popen[bytes] | None = None


def report(what: str, **facts: object) -> None:
    print(json.dumps({"what": what, "at": time.monotonic(), "process": member._process.child.pid, **facts}), flush=True)


def start() -> tuple[subprocess.Popen[bytes], processes.Handle]:
    """A process that sleeps, and what it gave to be held by."""
    ours, theirs = Channel.pair()
    command = [sys.executable, "-c", SLEEPER, str(theirs.fileno())]
    program = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdout=subprocess.DEVNULL, start_new_session=True)
    theirs.close()
    received = ours.receive()
    assert received is not None
    ours.close()
    return program, processes.received_handle(received[1])


def stop() -> None:
    if workers is not None:
        workers.kill()
        workers.wait()


def join() -> None:
    member.join(1, "trainer")


try:
    join()
    number = -1
    while True:
        wait_readable([member], member.poll_timeout())
        for event in member.drain():
            match event:
                case RankAssignment():
                    number = event.round
                    workers, handle = start()
                    member.guard(handle.fileno())
                    report("seat", round=number, size=event.group_world_size, workers=workers.pid)
                case RoundEnd():
                    report("end", why=event.why)
                    stop()
                    member.post(Stopped(member.node, number, ()))
                    join()
                case ContactLost():
                    report("lost", why=event.why)
                    stop()
                    member.post(Stopped(member.node, number, ()))
                    join()
                case Final():
                    report("final", kind=event.kind, why=event.why)
                    stop()
                    member.close()
                    raise SystemExit(0)
except RendezvousError as error:
    report("error", kind=type(error).__name__, why=str(error))
    stop()
    member.close()
    raise SystemExit(1) from error
