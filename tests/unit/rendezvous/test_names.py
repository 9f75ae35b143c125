"""What a node is called."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from elasticlib._untrusted import name
from elasticlib.rendezvous._names import node_name


@pytest.mark.parametrize("host", ["plain", "höst", "\udce9t\x1b[2J\n", "x" * 5000, ""])
def test_whatever_a_machine_is_called_its_node_has_a_name_that_others_take(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=host))

    first, second = node_name(), node_name()

    assert first == name(first)
    assert first != second
