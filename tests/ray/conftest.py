"""One Ray cluster of three nodes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray._cluster import Cluster, cluster, missing


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Three nodes, all of them free when a test begins, since each test waits for its job's end."""
    if why := missing():
        pytest.skip(why)
    with cluster("n1", "n2", "n3") as found:
        yield found
