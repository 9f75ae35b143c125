"""The process group of a pool's calls, in one rank."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch.distributed as dist

from elasticlib.workers.child._call_group import CallGroup

THERE = object()
"""The process group."""


class Store:
    """Of a group whose other rank has not come yet."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def set_timeout(self, limit: datetime.timedelta) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        return amount

    def set(self, key: str, value: str) -> None:
        self.happened.append("told that all are there")

    def wait(self, keys: list[str], limit: datetime.timedelta) -> None:
        self.happened.append("waited")
        raise dist.DistStoreError("nobody came")


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: Store(found))
    monkeypatch.setattr(dist, "PrefixStore", lambda *_: Store(found))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.append("made"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: found.append("destroyed"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return found


def test_a_group_is_left_only_once_all_ranks_are_in_it(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo tells a rank that still connects to one which has gone that its peer was lost."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: None, raising=False)
    group: Any = CallGroup(None)
    monkeypatch.setattr(type(dist.group), "WORLD", property(lambda _: THERE))
    group.begin(1, "fresh", "gloo", by_all=True)

    group.leave()

    assert ["made", "waited", "destroyed"] == happened


def test_a_group_that_a_call_has_ended_itself_is_not_ended_again(
    happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = CallGroup(None)
    monkeypatch.setattr(type(dist.group), "WORLD", property(lambda _: THERE))
    group.begin(1, "fresh", "gloo", by_all=True)
    monkeypatch.setattr(type(dist.group), "WORLD", property(lambda _: None))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)

    assert "" == group.end()
    group.leave()

    assert "destroyed" not in happened


def test_last_rank_notifies_the_others(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(type(dist.group), "WORLD", property(lambda _: THERE))

    CallGroup(None).begin(1, "fresh", "gloo", by_all=True)

    assert ["made", "told that all are there"] == happened
