"""Which modules of this program were edited since it imported them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from elasticlib.preload._edited import Edits


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """One that this program has imported, with its bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(tmp_path)
    edit(tmp_path / "of_this_project.py", 1)
    yield importlib.import_module("of_this_project")
    sys.modules.pop("of_this_project", None)


def edit(file: Path, version: int) -> None:
    file.write_text(f"VERSION = {version}\n")
    os.utime(file, (1000 * version, 1000 * version))


def is_reported(edits: Edits, caplog: pytest.LogCaptureFixture) -> bool:
    caplog.clear()
    edits.warn()
    return any("of_this_project changed on disk" in each.getMessage() for each in caplog.records)


def test_module_edited_before_the_first_check_is_reported_once(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    edit(Path(str(module.__file__)), 2)
    edits = Edits()

    assert [is_reported(edits, caplog), is_reported(edits, caplog)] == [True, False]


def test_unchanged_module_is_not_reported(module: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    edits = Edits()

    assert [is_reported(edits, caplog), is_reported(edits, caplog)] == [False, False]


def test_edit_between_two_checks_is_reported_unless_module_reloaded(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    edits = Edits()
    edits.warn()
    edit(Path(str(module.__file__)), 2)
    found = is_reported(edits, caplog)
    edit(Path(str(module.__file__)), 3)
    importlib.reload(module)

    assert (found, is_reported(edits, caplog)) == (True, False)


def test_old_bytecode_is_ignored_if_bytecode_writing_is_off(
    module: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    edit(Path(str(module.__file__)), 2)
    importlib.reload(module)

    assert not is_reported(Edits(), caplog)
