"""Names of nodes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from elasticlib._untrusted import name
from elasticlib.rendezvous._names import node_name


@pytest.mark.parametrize("host", ["plain", "höst", "\udce9t\x1b[2J\n", "x" * 5000, ""])
def test_node_gets_a_unique_valid_name_from_any_host_name(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=host))

    first, second = node_name(), node_name()

    assert first == name(first)
    assert first != second
