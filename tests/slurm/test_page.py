"""The script of the page *Slurm* is pasted as it stands, and works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm._cluster import Cluster
from tests.slurm._page import call_of_page, script_of_page

pytestmark = pytest.mark.slow

TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"node {os.environ['GROUP_RANK']} of {os.environ['SLURM_PROCID']} trained with {total.item():g} of "
      f"{os.environ['WORLD_SIZE']} ranks\\n", end="", flush=True)
"""


def test_script_of_the_page_trains_on_four_nodes(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    script = tmp_path / "job.sh"
    script.write_text(script_of_page())

    job = slurm.submit(script)

    assert "COMPLETED" == job.ends(), job.output
    for node in range(4):
        assert re.search(rf"node {node} of {node} trained with (\d+) of \1 ranks", job.output), job.output


def test_file_of_the_page_prints_the_results_of_four_nodes(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(call_of_page())
    done = subprocess.run(
        slurm.head.entered("env", "--chdir", str(tmp_path), sys.executable, "call.py"),
        env={**os.environ, **slurm.environment(), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )

    found = re.findall(r"\('(\w+)', ([\d.]+)\)", done.stdout)
    assert {"m1", "m2", "m3", "m4"} == {node for node, _ in found}, done.stdout + done.stderr
    assert {str(len(found) * 0.5)} == {total for _, total in found}, done.stdout
