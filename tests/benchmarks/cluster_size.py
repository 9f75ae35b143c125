"""
What a job costs its store, by its number of nodes: ``python -m tests.benchmarks.cluster_size``.

Operations and bytes a node, in a simulated cluster with the real protocol: for the first round, for the next one
after a failure, for each idle minute, and for an end after which all workers of all nodes have failed, each with a
message and a traceback of 20,000 characters. Besides, the longest letter, notice and document against what stores
take: etcd 1.5 MB a request, TCPStore 8 MiB a value. An operation is one key or entry that a call touches, of nodes and
coordinator together; bytes are those of keys and values, signatures aside. Constant in the number of nodes is the
promise.
"""

from __future__ import annotations

import argparse
import sys
import time

from attrs import frozen

from elasticlib.testing import FailWorker, FaultPlan, Rules, SimulatedCluster, Started

SIZES = (4, 64, 1000, 10_000)
FAILURE = 100.0
HEARTBEAT = 10.0
IDLE = 60.0
WORKERS, LENGTH = 8, 20_000
_SETTLED = 20.0


@frozen
class Cost:
    """Of one phase, for each node."""

    operations: float
    bytes: float


@frozen
class Row:
    """All phases of one size."""

    nodes: int
    first: Cost
    next: Cost
    minute: Cost
    end: Cost
    """Of the verdict of large failures, with an elected coordinator, which writes down what it knows."""
    end_seconds: float
    """Simulated, from the failures to the last node that was told."""
    longest: tuple[int, int, int]
    """Bytes of the longest letter, notice and document, before it is packed, of that job."""
    first_seconds: float
    """Simulated, from the first agent's start to the last worker's."""
    next_seconds: float
    """Simulated, from the failure to the last worker's start."""
    computed: float
    """Real seconds that all this took here."""


def measure(nodes: int) -> Row:
    """Run a job of so many nodes: join, idle, fail once, and start anew."""
    began = time.monotonic()
    rules = Rules(nodes, nodes, 3, heartbeat=HEARTBEAT)
    plan = FaultPlan([FailWorker(nodes - 1, FAILURE)])
    cluster = SimulatedCluster(rules, nodes, plan, work=10_000.0, uneven=False, count_bytes=True)
    marks = []
    for until in (_SETTLED, _SETTLED + IDLE, FAILURE, FAILURE + _SETTLED):
        cluster.run(until)
        assert cluster.store is not None
        marks.append((cluster.store.use.touched, cluster.store.use.bytes))

    def cost(before: tuple[int, int], after: tuple[int, int], idle: float, minute: Cost | None) -> Cost:
        share = idle / IDLE
        operations, size = ((b - a) / nodes for a, b in zip(before, after, strict=True))
        if minute is not None:
            operations, size = operations - share * minute.operations, size - share * minute.bytes
        return Cost(operations, size)

    minute = cost(marks[0], marks[1], IDLE, None)
    begun = [record for record in cluster.history if isinstance(record, Started)]
    starts = [[record.at for record in begun if record.round == number] for number in (0, 1)]
    assert [nodes, nodes] == [len(starts[0]), len(starts[1])]
    end = _end(nodes)
    return Row(
        nodes,
        cost((0, 0), marks[0], _SETTLED, minute),
        cost(marks[2], marks[3], _SETTLED, minute),
        minute,
        *end,
        max(starts[0]),
        max(starts[1]) - FAILURE,
        time.monotonic() - began,
    )


def _end(nodes: int) -> tuple[Cost, float, tuple[int, int, int]]:
    """A job of so many nodes that ends by large failures of all its workers."""
    plan = FaultPlan([FailWorker(node, _SETTLED, workers=WORKERS, text=LENGTH) for node in range(nodes)])
    rules = Rules(nodes, nodes, 0, heartbeat=HEARTBEAT)
    cluster = SimulatedCluster(rules, nodes, plan, "elected", work=10_000.0, uneven=False, count_bytes=True)
    cluster.run(_SETTLED - 0.001)
    assert cluster.store is not None
    use = cluster.store.use
    before = (use.touched, use.bytes)
    cluster.run(2 * _SETTLED)
    told = [verdict.at for verdict in cluster.verdicts.values() if verdict.kind == "failed"]
    assert len(told) == nodes
    cost = Cost((use.touched - before[0]) / nodes, (use.bytes - before[1]) / nodes)
    return cost, max(told) - _SETTLED, (use.longest["post"], use.longest["write"], use.longest["save"])


def table(rows: list[Row]) -> str:
    """The rows as markdown."""
    head = ("nodes", "first round: operations", "bytes", "next round: operations", "bytes", "idle minute: operations",
            "bytes", "end: operations", "bytes", "letter", "notice", "document")  # fmt: skip
    lines = [head, tuple("---:" for _ in head)]
    for row in rows:
        costs = (
            figure for cost in (row.first, row.next, row.minute, row.end) for figure in (cost.operations, cost.bytes)
        )
        sizes = (f"{size:,}" for size in row.longest)
        lines.append((f"{row.nodes:,}", *(f"{figure:,.1f}" for figure in costs), *sizes))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cluster_size", description=main.__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of nodes")
    rows = []
    for nodes in parser.parse_args().sizes:
        rows.append(measure(nodes))
        print(f"{nodes} nodes: {rows[-1].computed:.1f} s to compute", file=sys.stderr)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
