"""
What the tests with machines of their own share.

In CI one variant of each test runs, chosen by the seed `ELASTICLIB_SAMPLE` (0); elsewhere, or with ``all``, all do.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts._netns import Host, machines, missing

HERE = Path(__file__).parent
SAMPLE = os.environ.get("ELASTICLIB_SAMPLE", "0" if os.environ.get("CI") == "true" else "all")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SAMPLE == "all":
        return
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if HERE in item.path.parents:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    # Each test draws for itself: another test more or less changes nothing for the others.
    chosen = {random.Random(f"{SAMPLE}/{name}").choice(found) for name, found in variants.items()}
    left_out = [item for found in variants.values() for item in found if item not in chosen]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


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
