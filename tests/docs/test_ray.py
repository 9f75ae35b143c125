"""The file of the page *Ray* trains on a Ray cluster of two nodes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import elasticlib
from tests.process.launches import environment

pytestmark = pytest.mark.slow

PAGE = Path(elasticlib.__file__).parent / "docs" / "ray.md"
LIMIT = 120.0
CLUSTER = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

settings = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
try:
    cluster.add_node(**settings)
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    status = subprocess.run([sys.executable, "ray_train.py"]).returncode
finally:
    cluster.shutdown()
sys.exit(status)
"""


def test_file_of_the_page_trains_on_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    [file] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "ray_train.py").write_text(file)

    done = subprocess.run(
        [sys.executable, "-c", CLUSTER],
        cwd=tmp_path,
        env=environment(RAY_USAGE_STATS_ENABLED="0"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "{0: 2.0, 1: 2.0}" in done.stdout, done.stdout + done.stderr
