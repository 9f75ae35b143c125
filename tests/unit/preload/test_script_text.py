"""Imports and variables in an entry point's text, and the modules imported ahead for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticlib.preload import _chosen_modules
from elasticlib.preload._allowed import COMPILER, NUMPY, OPTIMIZER, TORCH
from elasticlib.preload._script_text import read
from elasticlib.testing.ranks import _recorder
from elasticlib.workers.child import _pooled

TRAINING = (TORCH, OPTIMIZER)


def chosen(source: str, folder: Path) -> tuple[str, ...]:
    """Return the modules that are imported ahead for a script with that *source*."""
    (folder / "script.py").write_text(source)
    return _chosen_modules.of_script(str(folder / "script.py")).modules


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with modules beside the script."""
    (tmp_path / "helper.py").write_text("import socket\nname = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "part.py").write_text("from .beside import name\nfrom .. import helper\n")
    (tmp_path / "package" / "beside.py").write_text("name = 1\n")
    (tmp_path / "package" / "hidden.py").write_text("import torch\n")
    (tmp_path / "deep.py").write_text("from deeper import name\n")
    (tmp_path / "deeper.py").write_text("import lightning\nname = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "import os, sys\nprint(os.getcwd())",
        "from collections import abc\nimport json.decoder as d",
        "import helper",
        "from helper import name",
        "from package import part",
        "from package.part import name",
        "from . import helper",
        "def later():\n    import helper",
        "import script",
        "import __main__",
        "from __main__ import __file__",
    ],
)
def test_a_script_of_python_and_its_own_files_alone_waits_for_no_import(source: str, project: Path) -> None:
    assert () == chosen(source, project)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", (TORCH,)),
        ("import numpy\ndef later():\n    import torch.nn as nn", (TORCH,)),
        ("from torch import nn", (TORCH,)),
        ("from package import hidden", (TORCH,)),
        ("import importlib", (TORCH,)),
        ("__import__('torch')", (TORCH,)),
        ("exec('import torch')", (TORCH,)),
        ("no python", (TORCH,)),
        ("import joblib", (TORCH,)),
        ("try:\n    import numpy\nexcept ImportError: pass", (NUMPY,)),
        ("import torch\ntorch.optim.SGD", TRAINING),
        ("from torch.optim import AdamW", TRAINING),
        ("from torch import optim", TRAINING),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\nimport torch", (TORCH,)),
        ("from torch.distributed.fsdp import fully_shard", TRAINING),
        ("import deep", TRAINING),
        ("from transformers import AutoModel", TRAINING),
        ("import re, torch\nre.compile('a')", (TORCH,)),
        ("import torch\nmodel = torch.compile(model)", (*TRAINING, COMPILER)),
        ("import torch\n@torch.compile\ndef f(): pass", (*TRAINING, COMPILER)),
    ],
)
def test_modules_that_a_script_mentions_are_imported_ahead(
    source: str, expected: tuple[str, ...], project: Path
) -> None:
    assert expected == chosen(source, project)


def test_a_file_of_the_projects_own_hides_the_installed_one(tmp_path: Path) -> None:
    """As it does when the script runs: its folder comes first on the search path."""
    (tmp_path / "torch.py").write_text("import os\n")

    assert () == chosen("import torch\n", tmp_path)


def test_script_that_cannot_be_read_quickly_may_import_torch(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("# " + "x" * (1 << 20))
    for number in range(120):
        (tmp_path / f"chain{number}.py").write_text(f"import chain{number + 1}\n")
    (tmp_path / "chain120.py").touch()

    for name in ("long.py", "missing.py", "chain0.py"):
        assert not read(str(tmp_path / name), str(tmp_path)).is_whole


# Variables.


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['TORCH_LOGS'] = 'all'",
        "os.environ.setdefault('TORCH_LOGS', 'all')",
        "os.environ.update(TORCH_LOGS='all')",
        "os.environ.update({'TORCH_LOGS': 'all'})",
        "os.environ |= {'TORCH_LOGS': 'all'}",
        "os.putenv('TORCH_LOGS', 'all')",
        "variables = os.environ; variables['TORCH_LOGS'] = 'all'",
        "for name in ('TORCH_LOGS', 'TORCH_TRACE'): os.environ[name] = 'all'",
        "os.environ[f'TORCH_{name}'] = 'all'",
        "os.environ.setdefault(name, 'all')",
        "os.environ.pop(name, None)",
        "for name, value in settings.items(): os.environ.setdefault(name, value)",
        "os.unsetenv(name)",
        "os.environ.update(settings)",
        "os.environ.update({**settings})",
        "os.environ |= settings",
        "del os.environ['TORCH_LOGS']",
        "os.environ.pop('TORCH_LOGS', None)",
        "def prepare(): os.environ['TORCH_LOGS'] = 'all'\nprepare()",
        "os.environ['OMP_NUM_THREADS'] = str(count)",
        "os.environ.update(OMP_NUM_THREADS='1')",
        "if many: os.environ['OMP_NUM_THREADS'] = '1'",
    ],
)
def test_a_variable_that_is_set_before_torch_keeps_torch_for_the_worker(line: str, tmp_path: Path) -> None:
    assert () == chosen(f"import os\n{line}\nimport torch\ntorch.optim", tmp_path)
    assert TRAINING == chosen(f"import os\nimport torch\n{line}\ntorch.optim", tmp_path)
    (tmp_path / "settings.py").write_text(f"import os\n{line}\n")
    assert () == chosen("import settings\nimport torch\ntorch.optim", tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['MY_VARIABLE'] = 'all'",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'",
        "os.environ.setdefault('OMP_NUM_THREADS', '1')",
        "os.environ.get('TORCH_LOGS')",
        "os.getenv('TORCH_LOGS')",
        "'TORCH_LOGS' in os.environ",
        "os.environ.get('TORCH_LOGS', 'TORCH')",
        "settings.update(other)",
        "settings.setdefault(name, 'all')",
        "rank = os.environ.get(name)",
        "settings[name] = other",
    ],
)
def test_other_variables_and_lookups_do_not(line: str, tmp_path: Path) -> None:
    assert (TORCH,) == chosen(f"import os\n{line}\nimport torch", tmp_path)


@pytest.mark.parametrize(("line", "threads"), [("os.environ['OMP_NUM_THREADS'] = '3'", 3), ("x = '3'", None)])
def test_a_plain_number_of_threads_is_taken_from_the_text(line: str, threads: int | None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import os\n{line}\nimport torch\n")

    choice = _chosen_modules.of_script(str(tmp_path / "script.py"))

    assert ((TORCH,), threads) == (choice.modules, choice.threads)


# Functions.


def test_of_a_function_what_its_module_set_is_in_the_environment_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = "import os\nos.environ['TORCH_LOGS'] = 'all'\ndef train():\n    import torch\n    torch.optim\n"
    inside = "import os\ndef train():\n    os.environ['TORCH_LOGS'] = 'all'\n    import torch\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for name, source in (("sets_outside", outside), ("sets_inside", inside)):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setenv("TORCH_LOGS", "")
        found.append(_chosen_modules.of_function(__import__(name).train).modules)

    assert [TRAINING, ()] == found


def test_a_function_without_a_file_may_import_torch() -> None:
    namespace: dict[str, object] = {}
    exec("def train(): pass", namespace)

    assert (TORCH,) == _chosen_modules.preload_for(namespace["train"])
    assert (TORCH,) == _chosen_modules.preload_for(len)
    assert (TORCH,) == _chosen_modules.preload_for("a_program")


@pytest.mark.parametrize("serve", [_pooled.serve_calls, _recorder.pool])
def test_serving_a_pool_does_not_prevent_the_import_of_torch(serve: Callable[..., None]) -> None:
    assert (TORCH,) == _chosen_modules.preload_for(serve)


# Functions that agents on other machines call once.

CALLED_ONCE = """
import functools, os, sys
from elasticlib import should_stop

def plain(): return os.getpid()

def outer(number):
    def captures(): return number
    return captures

@functools.wraps(plain)
def wraps(): pass

class Trainer:
    def __call__(self): return plain()
    def method(self): return plain()

captures, bound, instance, partial = outer(1), Trainer().method, Trainer(), functools.partial(plain)
"""


def needs_nothing(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether *name* in *source* needs no import ahead, in a program without torch."""
    path = folder / "calls.py"
    path.write_text(source)
    namespace: dict[str, object] = {"__name__": "calls"}
    exec(compile(source, str(path), "exec"), namespace)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return _chosen_modules.needs_nothing_ahead(namespace[name])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", True),
        ("captures", False),
        ("wraps", False),
        ("bound", False),
        ("instance", False),
        ("partial", False),
    ],
)
def test_a_plain_function_of_python_alone_needs_nothing_ahead(
    name: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected == needs_nothing(name, CALLED_ONCE, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "statement", ["import torch", "import numpy", "import lightning", "import importlib", "exec(a)"]
)
def test_a_function_beside_other_imports_may_need_torch(
    statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"def later():\n    {statement}\ndef plain(): pass\n"

    assert not needs_nothing("plain", source, tmp_path, monkeypatch)


def test_a_function_in_a_program_with_torch_may_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calls.py"
    path.write_text("def plain(): pass\n")
    namespace: dict[str, Callable[[], None]] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    monkeypatch.setitem(sys.modules, "torch", sys)

    assert not _chosen_modules.needs_nothing_ahead(namespace["plain"])


def test_a_function_of_a_cell_may_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, object] = {}
    exec("def train(): pass", namespace)
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert not _chosen_modules.needs_nothing_ahead(namespace["train"])
