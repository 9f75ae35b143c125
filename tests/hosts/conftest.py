"""Fixtures of the tests that have machines of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.hosts._netns import Host, machines, missing


@pytest.fixture
def hosts() -> Iterator[tuple[Host, ...]]:
    """Four machines; in a job with etcd, the last one is etcd's."""
    if why := missing():
        pytest.skip(why)
    with machines(4) as found:
        yield found


@pytest.fixture(params=["c10d", "etcd"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both sorts of rendezvous."""
    name: str = request.param
    if name == "etcd" and shutil.which("etcd") is None:
        pytest.skip("no etcd on this machine")
    return name
