"""The facade: what a user may import from `elasticlib`, once each, and what that costs."""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

import elasticlib
import elasticlib.errors
import elasticlib.spec
import elasticlib.state

CORE = {
    "ChildFailedError",
    "DefaultLogsSpecs",
    "LaunchConfig",
    "LocalElasticAgent",
    "LogsDest",
    "LogsSpecs",
    "ProcessFailure",
    "RunResult",
    "SignalException",
    "SimpleElasticAgent",
    "Std",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "elastic_launch",
    "launch_agent",
    "record",
}
"""torch's names, that programs import by name when they move over."""


def test_every_exported_name_is_there() -> None:
    assert [] == [name for name in elasticlib.__all__ if not hasattr(elasticlib, name)]


def test_every_name_is_exported_once_and_in_order() -> None:
    counted = collections.Counter(elasticlib.__all__)

    assert [] == [name for name, count in counted.items() if count > 1]
    assert sorted(elasticlib.__all__) == list(elasticlib.__all__)


@pytest.mark.parametrize("module", ["elasticlib", "elasticlib.rendezvous", "elasticlib.testing", "elasticlib.workers"])
def test_type_checkers_see_what_is_loaded_at_the_first_use(module: str) -> None:
    """Each name is imported as itself, which is how a typed package says that it offers it."""
    found = importlib.import_module(module)
    imported = {
        (each.asname, f"{node.module}.{each.name}")
        for node in ast.walk(ast.parse(inspect.getsource(found)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elasticlib.")
        for each in node.names
    }

    offered = {name for name in found.__all__ if not name.startswith("_")}
    assert {(name, path) for name, path in imported if path.endswith(f".{name}")} == imported
    assert offered == {name for name, _ in imported}
    for name, path in imported:
        assert getattr(found, name) is getattr(importlib.import_module(path.rpartition(".")[0]), name)


def offering() -> Iterator[pathlib.Path]:
    """Files of the modules whose names are all those that they import."""
    for path in pathlib.Path(elasticlib.__file__).parent.rglob("*.py"):
        if "\n_lazy.offer(" in path.read_text(encoding="utf-8"):
            yield path


@pytest.mark.parametrize("path", sorted(offering()), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_type_checkers_see_what_is_loaded_at_once(path: pathlib.Path) -> None:
    """Each name is imported as itself, or with all others, and no list stands beside it that they could not read."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names = [each for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names if each.name != "_lazy"]

    assert {ast.Expr, ast.ImportFrom} == {type(node) for node in nodes}
    assert [] == [each.name for each in names if each.name != "*" and each.asname != each.name]


def test_torchs_names_are_exported() -> None:
    assert set() == CORE - set(elasticlib.__all__)


@pytest.mark.parametrize("module", [elasticlib.errors, elasticlib.spec, elasticlib.state])
def test_every_public_class_of_the_vocabulary_is_exported(module: object) -> None:
    public = {
        name
        for name, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == getattr(module, "__name__", "") and not name.startswith("_")
    }

    assert set() == public - set(elasticlib.__all__)


def test_nothing_public_is_left_out_of_the_list() -> None:
    for name in elasticlib.__all__:  # many are loaded when somebody asks for them
        getattr(elasticlib, name)

    public = {
        name for name, each in vars(elasticlib).items() if not name.startswith("_") and not inspect.ismodule(each)
    } - {"annotations"}

    assert public == {name for name in elasticlib.__all__ if not name.startswith("_")}


@pytest.mark.slow
@pytest.mark.parametrize("module", ["elasticlib", "elasticlib.run"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"

    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()

    assert set() == {"torch", "numpy", "IPython", "hypothesis", "pytest"} & set(loaded)
    assert "elasticlib" in loaded
