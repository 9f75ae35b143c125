"""Imports of the frameworks that were learned leave a worker as they leave a program, attribute by attribute."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.test_fresh_program import DIFFERENT, ROOT, RUN, SCRIPTS

pytestmark = pytest.mark.slow

BY_ORDER = {
    "google.__": "of a namespace package, as cuda",
    "torch.distributed.rpc.": "copies how objects are pickled, to which the package regex adds, which comes later here",
    "torch.distributed.nn.api.remote_module._internal_rpc_pickler": "the same",
    "tempfile.tempdir": "each worker looks for a folder by itself",
    "scipy.sparse._data.n": "the last one of a set of functions, which has the order of their addresses",
    "scipy._lib.array_api_compat.numpy.": "Lightning, which comes later here, names numpy.Inf, which scipy copies",
}
"""By prefix, what depends on chance, or on which of two packages is imported first; with the reason."""
_MOST_RUNS = 10
"""Each finds out at least one module more that cannot be imported ahead."""


def states(command: list[str], cache: Path) -> tuple[dict[str, Any], str]:
    """What the script prints, and what the launcher says."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "ELASTICLIB_CACHE": str(cache), "LOGLEVEL": "INFO"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert 0 == done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("modules", ["lightning", "transformers.models.llama.modeling_llama,transformers.trainer"])
def test_learned_imports_leave_the_same_state_in_a_worker_as_in_a_program(modules: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(modules.partition(".")[0]) is None:
        pytest.skip("the framework is not installed")
    script = str(SCRIPTS / "state.py")
    plain = [states([sys.executable, "-u", script, modules], tmp_path)[0] for _ in range(2)]
    launch = [*RUN, "--nproc-per-node", "1", script, modules]
    for _ in range(_MOST_RUNS):
        worker, said = states(launch, tmp_path)
        if "are learned" in said:
            break
    else:
        pytest.fail("nothing was learned")

    expected, again = (each["state"] for each in plain)
    any_two = {name for name in expected if expected[name] != again.get(name)}
    known = (*DIFFERENT, *BY_ORDER)
    differing = {
        name: (expected[name][:300], worker["state"].get(name, "missing")[:300])
        for name in expected
        if name not in any_two and expected[name] != worker["state"].get(name) and not name.startswith(known)
    }
    assert {} == differing
    assert not set(plain[0]["modules"]) - set(worker["modules"])
