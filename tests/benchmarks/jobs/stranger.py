"""
A stranger in a job's store, who has no token: BACKEND ENDPOINT RUN_ID SEED; until he is killed.

He reads what he likes, and writes what can be nobody's and what was somebody's once: messages that he made up, messages
and heartbeats that he has seen, in other places and later, and bytes that are nothing.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time

from elasticlib.errors import RendezvousError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._exchange import (
    ANNOUNCEMENT,
    COORDINATOR_HEARTBEAT,
    Exchange,
    heartbeat_key,
    mailbox_key,
)
from elasticlib.rendezvous.protocol._messages import Acknowledgement, Close, Envelope, Leave, encode
from elasticlib.rendezvous.stores._c10d import C10dBackend
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend

_PAUSE = 0.2
"""Seconds between two of his acts, at most."""
_BOXES = 6
"""Of each node, those that he looks for."""


def connect(backend: str, endpoint: str, run_id: str) -> Exchange:
    """A connection of his own, once the job greets."""
    job = NodeJob(run_id=run_id, node="stranger", backend=backend, endpoint=endpoint, is_host=False)
    own = C10dBackend(job) if backend == "c10d" else EtcdBackend(job)
    while True:
        with contextlib.suppress(RendezvousError):
            exchange: Exchange = own.dial(5.0)
            if exchange.wait(ANNOUNCEMENT, 5.0):
                return exchange


def main() -> None:
    backend, endpoint, run_id, seed = sys.argv[1:]
    draw = random.Random(int(seed))
    exchange = connect(backend, endpoint, run_id)
    seen: dict[str, list[bytes]] = {}
    nodes: set[str] = set()
    while True:
        try:
            _meddle(exchange, draw, seen, nodes)
        except RendezvousError:
            exchange = connect(backend, endpoint, run_id)
        time.sleep(draw.uniform(0.0, _PAUSE))  # in his own time


def _meddle(exchange: Exchange, draw: random.Random, seen: dict[str, list[bytes]], nodes: set[str]) -> None:
    [announcement] = exchange.read([ANNOUNCEMENT])
    if announcement is not None:
        with contextlib.suppress(ValueError, AttributeError):
            nodes.add(str(json.loads(announcement).get("host")))
    mailboxes = [f"{node}/{seq}" for node in sorted(nodes) for seq in range(1, _BOXES)]
    keys = [
        COORDINATOR_HEARTBEAT,
        *map(heartbeat_key, mailboxes),
        *(mailbox_key(mailbox, index) for mailbox in mailboxes for index in range(3)),
    ]
    for key, data in zip(keys, exchange.read(keys), strict=True):
        if data and data not in seen.setdefault(key, []):
            seen[key] = [*seen[key][-20:], data]
    heartbeats = [key for key in seen if key.startswith("beat/")]
    match draw.randrange(4):
        case 0:
            node = draw.choice(sorted(nodes) or ["nobody/1"])
            report = draw.choice([Acknowledgement(node), Leave(node, "made up"), Close(node, "made up")])
            exchange.post(encode(Envelope(draw.randrange(1, 9), report), draw.choice([None, b"guessed"])))
        case 1:
            exchange.post(draw.randbytes(draw.randrange(1, 2000)))
        case 2 if heartbeats:  # the heartbeat of a while ago once more: the next good one takes its place again
            key = draw.choice(heartbeats)
            exchange.write({key: draw.choice(seen[key])})
        case _:
            exchange.write({f"box/{draw.choice(sorted(nodes) or ['nobody/1'])}/99/0": draw.randbytes(64)})


if __name__ == "__main__":
    main()
