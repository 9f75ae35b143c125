"""Heartbeats as the coordinator reads them."""

from __future__ import annotations

import pytest

from elasticlib.rendezvous.coordinator._incoming import Incoming
from elasticlib.rendezvous.protocol._messages import NodeHeartbeat, encode


@pytest.mark.parametrize("data", [None, b"scribble"], ids=["deleted", "overwritten"])
def test_missing_or_older_heartbeat_is_not_a_sign_of_life(data: bytes | None) -> None:
    incoming = Incoming("job", None)
    incoming.heartbeat("a/1", encode(NodeHeartbeat(7)), "nonce", 0.0)
    assert {"a/1": 7} == incoming.counts(["a/1"])

    incoming.heartbeat("a/1", data, "nonce", 1.0)

    assert {} == incoming.counts(["a/1"])
    incoming.heartbeat("a/1", encode(NodeHeartbeat(3)), "nonce", 2.0)
    assert {"a/1": 7} == incoming.counts(["a/1"])
