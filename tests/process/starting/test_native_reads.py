"""Variables that native code reads during the start of a fork server, compared with our lists."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest

from elasticlib.preload._reads import INTEL_OPENMP, INTERPRETER, LIBRARIES, READ_LATER
from tests.process.launches import environment, run_python
from tests.shims import NEEDS_COMPILER, built

pytestmark = [pytest.mark.slow, NEEDS_COMPILER]

OF_NO_EFFECT = {
    "PATH": "where Python looks for itself when it was started by a name without a slash, which we never do",
    "bar": "LLVM asks for it so that its compiler keeps a call, and drops the answer",
    "__PYVENV_LAUNCHER__": "it has a meaning on macOS alone",
}
IMPORTS = """
import json, os, sys
from elasticlib.workers.spawner import _fork_server

names, environ = set(), type(os.environ)
look_up, put = environ.__getitem__, environ.__setitem__
environ.__getitem__ = lambda self, name: (names.add(name), look_up(self, name))[1]
environ.__setitem__ = lambda self, name, value: (names.add(name), put(self, name, value))[1]
for name in sys.argv[1:]: __import__(name)
print(json.dumps(sorted(names)))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A library that logs the names that native code looks up."""
    return built("getenv", tmp_path_factory.mktemp("shim"))


def reads(shim: dict[str, str], log: Path, *modules: str) -> tuple[set[str], set[str]]:
    """Return the names that native code and Python code look up in a program that imports *modules*."""
    done = run_python("-c", IMPORTS, *modules, env=environment(**shim, GETENV_SHIM_LOG=str(log)), check=True)
    return set(log.read_text().split()), set(json.loads(done.stdout))


def unlisted(names: set[str], patterns: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def test_variables_that_the_interpreter_reads_are_listed(shim: dict[str, str], tmp_path: Path) -> None:
    """Also what libraries of Python's own modules read."""
    native, _ = reads(shim, tmp_path / "log")

    assert {"PYTHONPATH", "PYTHONHASHSEED", "LC_ALL"} <= native
    assert [] == unlisted(native - set(OF_NO_EFFECT), INTERPRETER)


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_variables_that_libraries_read_are_listed_or_observed(
    module: str, shim: dict[str, str], tmp_path: Path
) -> None:
    native, observed = reads(shim, tmp_path / "log", module)

    assert any(name.startswith("OPENBLAS_") for name in native)
    assert module != "torch" or {"TORCH_SHOW_CPP_STACKTRACES", "OMP_PROC_BIND", "MKL_DYNAMIC"} <= native
    assert set() == native & READ_LATER
    assert [] == unlisted(native - observed - set(OF_NO_EFFECT), (*INTERPRETER, *LIBRARIES, *INTEL_OPENMP))
