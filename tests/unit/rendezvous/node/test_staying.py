"""`must_stay`: a node that ends while others go on stays only where its engine would end them."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.node._staying import must_stay
from elasticlib.rendezvous.protocol._messages import Final

STEP = NodeJob(run_id="job", node="n2/1", backend="c10d", endpoint="n1:29400", ends_together=True)


@pytest.mark.parametrize(
    ("final", "stays"),
    [
        (None, True),
        (Final(False, "node n1 left", kind="closed"), True),
        (Final(False, "signal 15", kind="left"), True),
        (Final(False, "other arguments", kind="refused"), True),
        (Final(False, "stopped by hand", kind="stopped"), True),
        # All workers of the job are gone.
        (Final(False, "rank 0 failed"), False),
        (Final(False, "1 of 2 nodes", kind="timeout"), False),
        (Final(True, "all succeeded", round=0), False),
    ],
)
def test_a_node_stays_while_workers_of_others_may_run(final: Final | None, stays: bool) -> None:
    assert stays is must_stay(STEP, final, hosts_store=False)


@pytest.mark.parametrize(
    ("changes", "hosts_store"),
    [({"ends_together": False}, False), ({}, True), ({"store_type": "file"}, False), ({"backend": "etcd"}, False)],
)
def test_a_node_without_a_host_to_wait_for_leaves(changes: dict[str, Any], hosts_store: bool) -> None:
    assert not must_stay(evolve(STEP, **changes), None, hosts_store=hosts_store)
