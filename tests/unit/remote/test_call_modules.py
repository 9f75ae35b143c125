"""An agent that serves several calls imports the present files of the user's project."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from elasticlib.remote._call_modules import CallModules


def write(folder: Path, name: str, text: str) -> None:
    # Bytecode holds the size of its source: another one is read, also within a second.
    (folder / f"{name}.py").write_text(text)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two modules of a user, the second with a name of the first."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("of_user_a", "of_user_b"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    write(tmp_path, "of_user_a", "VALUE = 1")
    write(tmp_path, "of_user_b", "from of_user_a import VALUE")
    return tmp_path


def value_in(modules: CallModules) -> int:
    with modules.present():
        value: int = importlib.import_module("of_user_b").VALUE
        return value


def test_unchanged_modules_stay(project: Path) -> None:
    modules = CallModules()
    value_in(modules)
    former = sys.modules["of_user_b"]

    assert 1 == value_in(modules)
    assert former is sys.modules["of_user_b"]


def test_changed_module_is_imported_again_with_those_that_hold_its_names(project: Path) -> None:
    modules = CallModules()
    assert 1 == value_in(modules)

    write(project, "of_user_a", "VALUE = 1 + 1")

    assert 2 == value_in(modules)


def test_library_and_modules_of_the_agent_stay(project: Path) -> None:
    modules = CallModules()
    with modules.present():
        importlib.import_module("of_user_a")
        former = importlib.import_module("sched")

    write(project, "of_user_a", "VALUE = 1 + 1")
    with modules.present():
        assert former is importlib.import_module("sched")
        assert CallModules is importlib.import_module("elasticlib.remote._call_modules").CallModules


def test_removed_file_is_missing_in_the_next_call(project: Path) -> None:
    modules = CallModules()
    value_in(modules)

    (project / "of_user_a.py").unlink()

    with pytest.raises(ModuleNotFoundError, match="of_user_a"):
        value_in(modules)
