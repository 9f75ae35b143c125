"""The file of the page *Ray* trains on two nodes of a Ray cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import elasticlib
from tests.process.launches import environment
from tests.ray._cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

PAGE = Path(elasticlib.__file__).parent / "docs" / "ray.md"
LIMIT = 120.0


def test_file_of_the_page_trains_on_two_nodes(ray_cluster: Cluster, tmp_path: Path) -> None:
    [file] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "ray_train.py").write_text(file)

    done = subprocess.run(
        [sys.executable, "ray_train.py"],
        cwd=tmp_path,
        env=environment(RAY_ADDRESS=ray_cluster.address, RAY_USAGE_STATS_ENABLED="0"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "{0: 2.0, 1: 2.0}" in done.stdout, done.stdout + done.stderr
