"""One Slurm of four nodes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm._cluster import Cluster, cluster, missing


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Four nodes, all of them idle when a test begins, since each test waits for its job's end."""
    if why := missing():
        pytest.skip(why)
    with cluster(4) as found:
        yield found
