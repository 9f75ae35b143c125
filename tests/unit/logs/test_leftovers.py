"""Which of the folders that failed launches left may go, and that nothing else does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticlib.logs import DefaultLogsSpecs, _old_folders
from elasticlib.logs._old_folders import KEPT, MARK, YOUNGEST, mark, sweep

ENDED = {"started": "1"}
"""Facts of a program that is gone: its number is another one's by now."""
Leave = Callable[..., Path]


@pytest.fixture
def leave(tmp_path: Path) -> Leave:
    """Leaves a folder as a failed launch does, *age* seconds ago; *facts* differ from those of this program."""

    def new(number: int, age: float = 2 * YOUNGEST, **facts: Any) -> Path:
        folder = tmp_path / f"torchelastic_{number:03}"
        (folder / "run_x" / "attempt_0").mkdir(parents=True)
        (folder / "run_x" / "attempt_0" / "stderr.log").write_text("why it failed")
        (folder / MARK).write_text(json.dumps({"v": 1, **_old_folders._program(os.getpid()), **facts}))
        grow_old(folder, age - number)
        return folder

    return new


def grow_old(folder: Path, age: float) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - age,) * 2)


def test_of_too_many_the_oldest_go(leave: Leave, tmp_path: Path) -> None:
    folders = [leave(number, **ENDED) for number in range(KEPT + 5)]

    sweep(str(tmp_path))

    assert folders[5:] == sorted(tmp_path.iterdir())


def test_as_many_as_are_kept_all_stay(leave: Leave, tmp_path: Path) -> None:
    folders = [leave(number, **ENDED) for number in range(KEPT)]

    sweep(str(tmp_path))

    assert folders == sorted(tmp_path.iterdir())


def test_folders_with_young_marks_are_not_looked_through(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(KEPT + 5):
        leave(number, age=YOUNGEST / 2, **ENDED)
    looked_at: list[str] = []
    monkeypatch.setattr(_old_folders, "_has_ended", looked_at.append)

    sweep(str(tmp_path))

    assert [] == looked_at


@pytest.mark.parametrize("facts", [ENDED, {"boot": "another"}], ids=["its number is another's", "before a boot"])
def test_leftover_folder_of_a_dead_program_is_removed(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    monkeypatch.setattr(_old_folders, "KEPT", 0)
    folder = leave(0, **facts)

    sweep(str(tmp_path))

    assert not folder.exists()


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {**ENDED, "host": "another"},
        {**ENDED, "namespace": "pid:[7]"},
        {**ENDED, "v": 2},
        {**ENDED, "pid": "7"},
        {"boot": ""},
    ],
    ids=["living", "another machine's", "a container's", "a later version's", "not ours", "unknown"],
)
def test_folder_of_a_possibly_living_program_is_kept(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    monkeypatch.setattr(_old_folders, "KEPT", 0)
    folder = leave(0, **facts)

    sweep(str(tmp_path))

    assert (folder / "run_x" / "attempt_0" / "stderr.log").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", "[" * 5000, '{"v": 1}', "\udc80"])
def test_a_mark_that_is_none_keeps_its_folder(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(_old_folders, "KEPT", 0)
    folder = leave(0)
    (folder / MARK).write_bytes(text.encode("utf-8", "surrogateescape"))
    grow_old(folder, 2 * YOUNGEST)

    sweep(str(tmp_path))

    assert folder.exists()


@pytest.mark.parametrize("young", [MARK, "run_x/attempt_0/stderr.log", "run_x", "."])
def test_folder_changed_within_a_day_is_kept(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, young: str
) -> None:
    monkeypatch.setattr(_old_folders, "KEPT", 0)
    folder = leave(0, **ENDED)
    os.utime(folder / young, (time.time() - YOUNGEST + 60,) * 2)

    sweep(str(tmp_path))

    assert folder.exists()


def test_only_marked_folders_of_that_name_are_touched(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_old_folders, "KEPT", 0)
    unmarked, renamed, linked = leave(0, **ENDED), leave(1, **ENDED), leave(2, **ENDED)
    (unmarked / MARK).unlink()
    renamed = renamed.rename(tmp_path / "results")
    linked = linked.rename(tmp_path / "mine")
    (tmp_path / "torchelastic_link").symlink_to(linked)
    for folder in (unmarked, renamed, linked):
        grow_old(folder, 2 * YOUNGEST)

    sweep(str(tmp_path))

    assert [True] * 3 == [folder.exists() for folder in (unmarked, renamed, linked)]


def test_folder_that_cannot_be_listed_raises_no_error(tmp_path: Path) -> None:
    sweep(str(tmp_path / "gone"))
    mark(str(tmp_path / "gone"))

    assert not any(tmp_path.iterdir())


def test_a_launch_that_leaves_its_marked_folder_clears_up_after_others(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at its start, which is waited for; and once an hour in a program."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(_old_folders, "KEPT", 2)
    folders = [leave(number, **ENDED) for number in range(3)]
    specs = DefaultLogsSpecs()

    specs.reify({0: {}})
    at_start = len(list(tmp_path.iterdir()))
    Path(specs.root_log_dir or "", "stderr.log").write_text("failed")
    specs.remove_if_temporary(only_if_empty=True)

    assert 4 == at_start
    assert sorted([folders[2], Path(specs.root_log_dir or "")]) == sorted(tmp_path.iterdir())
    assert not _old_folders._has_ended(specs.root_log_dir or "")
    folders.append(leave(4, **ENDED))
    specs.remove_if_temporary(only_if_empty=True)
    assert folders[-1].exists() and 3 == len(list(tmp_path.iterdir()))


def test_the_mark_alone_keeps_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    specs = DefaultLogsSpecs()
    specs.reify({0: {}})

    specs.remove_if_temporary(only_if_empty=True)

    assert not any(tmp_path.iterdir())


def test_a_log_dir_of_the_users_own_is_not_marked(tmp_path: Path) -> None:
    DefaultLogsSpecs(tmp_path).reify({0: {}})

    assert not (tmp_path / MARK).exists()
