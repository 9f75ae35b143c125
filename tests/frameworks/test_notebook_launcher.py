"""Accelerate's `notebook_launcher`, which forks its workers from the notebook: its shipped tests pass on elasticlib."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.frameworks.starts import LIMIT, environment, needs

pytestmark = [pytest.mark.slow, needs("accelerate")]

SHIPPED = """
import sys
import torch.distributed.elastic.multiprocessing.errors
import torch.distributed.launcher.api
import elasticlib.launcher.api
import elasticlib.multiprocessing.errors

# What the launcher and its tests import when they need it.
sys.modules["torch.distributed.launcher.api"] = elasticlib.launcher.api
sys.modules["torch.distributed.elastic.multiprocessing.errors"] = elasticlib.multiprocessing.errors
import pytest
from accelerate.test_utils.scripts import test_notebook

sys.exit(pytest.main([test_notebook.__file__, "-q", "-p", "no:cacheprovider", "-k", sys.argv[1], "--rootdir=/"]))
"""


@pytest.mark.parametrize("shipped", ["can_initialize", "static", "c10d", "fault_tolerant", "monitoring"])
def test_its_shipped_tests_pass(shipped: str) -> None:
    """Restarts among them: each round binds the port of the one before."""
    settings = {"ACCELERATE_NUM_PROCESSES": "2", "ACCELERATE_USE_CPU": "true"}

    done = subprocess.run(
        [sys.executable, "-c", SHIPPED, shipped],
        env={**environment(), **settings},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "1 passed" in done.stdout
