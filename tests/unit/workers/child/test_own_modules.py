"""Modules of a project that have the name of others."""

from __future__ import annotations

import sys
import types
import zipfile
from pathlib import Path

import pytest

from elasticlib.workers.child import _own_modules


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with modules of all kinds."""
    for name in ("queue.py", "sympy/__init__.py", "numpy.cpython.py", "json/data.txt", "graph.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return tmp_path


NAMES = {"queue", "sympy", "numpy", "json", "graph", "torch"}


def test_modules_and_packages_hide_others_but_folders_without_init_do_not(project: Path) -> None:
    assert {"queue", "sympy"} == _own_modules.hidden_by([str(project)], NAMES)


def test_an_archive_hides_others_too(tmp_path: Path) -> None:
    path = tmp_path / "app.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("queue.py", "")

    assert {"queue"} == _own_modules.hidden_by([str(path)], NAMES)


def test_a_folder_that_is_not_there_hides_nothing() -> None:
    assert set() == _own_modules.hidden_by(["/no/such/folder"], NAMES)


def test_imports_find_the_projects_own_but_modules_of_the_start_stay(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "zipimport.py").touch()
    monkeypatch.setattr(sys, "modules", dict.fromkeys(["queue", "sympy", "sympy.core", "json", "zipimport"]))
    _own_modules.note_start({"zipimport"})
    try:
        _own_modules.make_way([str(project)])

        assert ["json", "zipimport"] == list(sys.modules)
        assert _own_modules.has_own("sympy")
        assert not _own_modules.has_own("cloudpickle")
    finally:
        _own_modules.note_start(())
        _own_modules.make_way(())


def test_the_projects_own_modules_stay_where_they_were_imported_already(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those that a user has preloaded."""
    monkeypatch.setattr(sys, "modules", {name: types.ModuleType(name) for name in ("queue", "sympy", "graph")})
    sys.modules["queue"].__file__ = str(project / "queue.py")
    sys.modules["sympy"].__file__ = str(project / "sympy" / "__init__.py")
    try:
        _own_modules.make_way([str(project)])

        assert ["queue", "sympy", "graph"] == list(sys.modules)
    finally:
        _own_modules.make_way(())


def test_only_modules_that_the_project_names_are_looked_at(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at each of a fork server's modules would copy much of its memory into each worker."""
    looked_at = set[str]()

    class Noted(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            looked_at.add(self.__name__)

    monkeypatch.setattr(sys, "modules", {name: Noted(name) for name in ("queue", "torch", "torch.nn", "json")})
    try:
        _own_modules.make_way([str(project)])

        assert {"queue"} == looked_at
        assert ["torch", "torch.nn", "json"] == list(sys.modules)
    finally:
        _own_modules.make_way(())


def test_project_folders_are_those_before_the_interpreters_in_the_path() -> None:
    assert ["/project", "/more"] == _own_modules.folders_before(
        ["/project", "/more", "/usr/lib", "/late"], {"/usr/lib"}
    )
