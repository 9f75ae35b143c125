"""
The file of the page *Ray* trains on a Ray cluster of two nodes.

``python -m tests.benchmarks.ray_page``, in an environment with Ray (``pip install ray``), which the tests do not need.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import elasticlib
from tests.process.launches import environment

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


def main() -> int:
    """Run the file of the page; return 0 if it has trained on both nodes."""
    [file] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with tempfile.TemporaryDirectory(prefix="ray-page-") as folder:
        Path(folder, "ray_train.py").write_text(file)
        done = subprocess.run(
            [sys.executable, "-c", CLUSTER],
            cwd=folder,
            env=environment(RAY_USAGE_STATS_ENABLED="0"),
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    print(done.stdout + done.stderr)
    has_trained = done.returncode == 0 and "{0: 2.0, 1: 2.0}" in done.stdout
    print("the page's file trained on two nodes" if has_trained else f"failed, status {done.returncode}")
    return 0 if has_trained else 1


if __name__ == "__main__":
    sys.exit(main())
