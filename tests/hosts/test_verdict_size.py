"""Failures too large to write down, with real processes and real stores."""

from __future__ import annotations

import shutil

import pytest

from tests.benchmarks.verdict_size import measure
from tests.hosts._netns import missing

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2), pytest.mark.skipif(bool(missing()), reason=missing() or "")]


@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_all_nodes_know_the_whole_root_cause_of_many_large_failures(backend: str) -> None:
    if backend != "c10d" and shutil.which("etcd") is None:
        pytest.skip("no etcd on this machine")
    found = measure(backend, nodes=12, workers=8, length=20_000)

    assert found.seconds < 30.0
    assert found.root == 40_000
