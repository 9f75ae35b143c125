"""
Cost of a job for its store, by number of nodes: ``python -m tests.benchmarks.cluster_size``.

The figures are operations and bytes per node, in a simulated cluster with the real protocol. They
cover the first round, each idle minute, the next round after a failure, the round after the loss of
a node, and an end. For the end, all workers of a thousand nodes fail, each with a message and a
traceback of 20,000 characters. The longest message, value and document are compared with the limits
of stores: etcd takes 1.5 MiB per request, TCPStore 8 MiB per value. An operation is one key or
entry that a call of a node or of the coordinator touches. Bytes are those of keys and values,
without signatures. The promise is that the cost is constant in the number of nodes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from elasticlib.rendezvous.stores._election import _pack
from elasticlib.testing import FailWorker, FaultPlan, Kill
from tests.sim.simulator import Rules, SimulatedCluster, Started

SIZES = (4, 64, 1000, 10_000)
COORDINATORS = ("fixed", "elected")
HEARTBEAT = 10.0
WORKERS, LENGTH = 8, 20_000
FAILING = 1000
"""Nodes whose workers fail for the end, at most."""
SETTLED = 20.0
"""Seconds after which nothing follows any more from what has happened."""
IDLE = 60.0
FAILURE = SETTLED + IDLE
LOSS = FAILURE + SETTLED
_OBJECTS = 1_000_000
"""After which garbage is looked for: ten thousand nodes are looked through each time, in vain."""
ETCD_TAKES, TCPSTORE_TAKES = 1_572_864, 8 * 1024 * 1024
"""Bytes, of a request and of a value."""


@frozen
class Cost:
    """Of one phase, for each node."""

    operations: float
    bytes: float


@frozen
class Row:
    """All phases of one size."""

    nodes: int
    coordinator: str
    costs: Mapping[str, Cost]
    """By phase."""
    seconds: Mapping[str, float]
    """Simulated, by phase, from the event to the last node that has its ranks, or was told the end."""
    envelope: int
    """Bytes of the longest one, of all phases."""
    value: int
    document: int
    """Bytes as it is; 0 where nobody writes one down."""
    packed: int
    """Bytes as it lies in etcd."""
    computed: float
    """Real seconds that all this took here."""


class _Job:
    """A simulated job whose store is counted."""

    def __init__(self, nodes: int, coordinator: str, plan: FaultPlan, rules: Rules) -> None:
        self.nodes = nodes
        self.cluster = SimulatedCluster(rules, nodes, plan, coordinator, work=10_000.0, uneven=False, count_bytes=True)
        self.packed = 0
        if self.cluster.store is not None:  # where it is not, nobody writes a document down
            self._saved, self.cluster.store.on_save = self.cluster.store.on_save, self._save

    def run(self, until: float) -> Cost:
        """Go on until then; what the job has cost each node so far."""
        store = self.cluster.run(until).store
        assert store is not None
        return Cost(store.use.touched / self.nodes, store.use.bytes / self.nodes)

    def longest(self) -> tuple[int, int, int, int]:
        """Bytes of the longest message, value and document, and of the document as it lies in etcd."""
        assert self.cluster.store is not None
        sizes = self.cluster.store.use.longest
        return sizes["post"], sizes["write"], sizes["save"], self.packed

    def _save(self, document: Any) -> None:
        self.packed = max(self.packed, len(_pack(document.data)))
        self._saved(document)


def measure(nodes: int, coordinator: str = "elected") -> Row:
    """Run two jobs of so many nodes: one that is formed again and again, and one that fails."""
    began = time.monotonic()
    plan = FaultPlan([FailWorker(nodes - 1, FAILURE), Kill(nodes - 2, LOSS)])
    job = _Job(nodes, coordinator, plan, Rules(nodes - 1, nodes, 3, heartbeat=HEARTBEAT))
    first, idle, second, third = (job.run(until) for until in (SETTLED, FAILURE, LOSS, LOSS + 2 * SETTLED))
    minute = _less(idle, first)
    begun = [record for record in job.cluster.history if isinstance(record, Started)]
    starts = [[record.at for record in begun if record.round == number] for number in range(3)]
    assert [nodes, nodes, nodes - 1] == [len(each) for each in starts], [len(each) for each in starts]
    end = _Job(nodes, coordinator, *_failing(nodes))
    before = end.run(SETTLED - 0.001)
    after = end.run(2 * SETTLED)
    ended = [outcome.at for outcome in end.cluster.outcomes.values() if outcome.kind == "failed"]
    assert len(ended) == nodes, len(ended)
    costs = {
        "first round": _less(first, _part(minute, SETTLED)),
        "idle minute": minute,
        "after a failure": _less(_less(second, idle), _part(minute, SETTLED)),
        "after a loss": _less(_less(third, second), _part(minute, 2 * SETTLED)),
        "end": _less(after, before),
    }
    seconds = (max(starts[0]), 0.0, max(starts[1]) - FAILURE, max(starts[2]) - LOSS, max(ended) - SETTLED)
    longest = (max(sizes) for sizes in zip(job.longest(), end.longest(), strict=True))
    computed = time.monotonic() - began
    return Row(nodes, coordinator, costs, dict(zip(costs, seconds, strict=True)), *longest, computed)


def _failing(nodes: int) -> tuple[FaultPlan, Rules]:
    failing = range(min(nodes, FAILING))
    plan = FaultPlan([FailWorker(node, SETTLED, workers=WORKERS, text=LENGTH) for node in failing])
    return plan, Rules(nodes, nodes, 0, heartbeat=HEARTBEAT)


def _part(minute: Cost, seconds: float) -> Cost:
    return Cost(minute.operations * seconds / IDLE, minute.bytes * seconds / IDLE)


def _less(cost: Cost, other: Cost) -> Cost:
    return Cost(cost.operations - other.operations, cost.bytes - other.bytes)


def table(rows: list[Row]) -> str:
    """The rows as two tables in markdown: operations and bytes of each phase, and the longest values."""
    phases = [*rows[0].costs]
    costs = [("nodes", "coordinator", *(f"{phase}: {what}" for phase in phases for what in ("operations", "bytes")))]
    sizes = [
        ("nodes", "coordinator", "letter", "value", "document", "in etcd", "loss, simulated s", "end", "computed s")
    ]
    for row in rows:
        figures = (f"{figure:,.1f}" for cost in row.costs.values() for figure in (cost.operations, cost.bytes))
        costs.append((f"{row.nodes:,}", row.coordinator, *figures))
        longest = (f"{size:,}" for size in (row.envelope, row.value, row.document, row.packed))
        seconds = (f"{each:.2f}" for each in (row.seconds["after a loss"], row.seconds["end"], row.computed))
        sizes.append((f"{row.nodes:,}", row.coordinator, *longest, *seconds))
    return "\n\n".join(map(_markdown, (costs, sizes)))


def _markdown(lines: list[tuple[str, ...]]) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, tuple("---:" for _ in head), *rest))


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cluster_size", description=main.__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of nodes")
    parser.add_argument("--coordinators", nargs="+", choices=COORDINATORS, default=COORDINATORS)
    options = parser.parse_args()
    gc.set_threshold(_OBJECTS)
    rows = []
    for nodes in options.sizes:
        for coordinator in options.coordinators:
            rows.append(measure(nodes, coordinator))
            print(f"{nodes} nodes, {coordinator}: {rows[-1].computed:.1f} s to compute", file=sys.stderr, flush=True)
    print(table(rows))
    print(f"\nStores take: etcd {ETCD_TAKES:,} bytes in a request, TCPStore {TCPSTORE_TAKES:,} in a value.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
