"""What is learned of an entry point from run to run, and the file that keeps it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticlib.workers import _profile
from elasticlib.workers._profile import Profile, load, save
from elasticlib.workers.child._import_notes import Import

ROOT = Path(__file__).parents[3]


def of(name: str, *changed: str) -> Import:
    return Import(name, f"/lib/{name}.py", frozenset(changed))


TORCH, A, B, C = map(of, ("torch", "a", "b", "c"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(_profile.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def only_file(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


def test_a_run_that_ended_well_says_all() -> None:
    """What it did not import is dropped."""
    assert (B, C) == Profile().after([A, B], whole=True).after([B, C], whole=True).imports


def test_a_run_that_did_not_end_well_only_adds() -> None:
    assert (A, B, C) == Profile().after([A, B], whole=True).after([C], whole=False).imports


def test_a_variable_that_any_run_changed_stays_changed() -> None:
    assert (of("a", "X"),) == Profile().after([of("a", "X")], whole=True).after([A], whole=True).imports


def test_torch_is_needed_until_a_whole_run_did_without() -> None:
    assert [True, True, False, True] == [
        Profile().needs_torch(),
        Profile().after([A], whole=False).needs_torch(),
        Profile().after([A], whole=True).needs_torch(),
        Profile().after([A, of("torch.nn")], whole=True).needs_torch(),
    ]


def test_in_place_of_what_is_refused_comes_what_it_imports() -> None:
    refused = {"a": ["reads RANK", [C.plain(), B.plain()]], "c": ["a thread", [A.plain()]]}

    assert [B, TORCH] == Profile((A, TORCH), refused).wanted()


def test_a_profile_comes_back_for_its_entry_point_alone(cache: Path) -> None:
    profile = Profile((A, of("b", "X")), {"c": ["a thread", [B.plain()]]}, whole=True)

    save("script /x.py", profile)

    assert profile == load("script /x.py")
    assert Profile() == load("script /y.py")
    assert 0o600 == only_file(cache).stat().st_mode & 0o777
    assert 0o700 == cache.stat().st_mode & 0o777


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"\xff\x00"),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_text("[" * 100_000),
        lambda file: file.write_text('{"format": 1}'),
        lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), "imports": ["os; evil"]})),
        lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), "refused": {"a": ["why", [1]]}})),
        lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), "entry": "another"})),
        lambda file: file.write_bytes(file.read_bytes() + b" " * (1 << 20)),
        lambda file: file.chmod(0o666),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.rename(file.with_suffix(".other")), file.symlink_to(file.with_suffix(".other"))),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
    ids="bytes empty deep keys import refusal entry long writable folder link fifo".split(),
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_line(
    damage: Callable[[Path], object], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("script /x.py", Profile((A,), whole=True))
    # A refusal is read where it stands in for a module.
    body = json.loads(only_file(cache).read_text())
    only_file(cache).write_text(json.dumps({**body, "refused": {"a": ["why", []]}}))
    damage(only_file(cache))

    with caplog.at_level(logging.WARNING, "elasticlib"):
        assert Profile() == load("script /x.py")

    (record,) = caplog.records
    assert "is ignored, and written anew after this run" in record.getMessage()


def test_nothing_is_kept_where_no_folder_is_wanted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_profile.CACHE_VARIABLE, "")

    save("script /x.py", Profile((A,)))

    assert Profile() == load("script /x.py")
    assert not cache.exists()


def test_the_folder_is_the_users_cache_where_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_profile.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Path("/home/me/.cache/elasticlib") == _profile.folder()

    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert Path("/caches/elasticlib") == _profile.folder()


def test_a_disk_that_takes_nothing_costs_nothing_else(cache: Path) -> None:
    cache.write_text("no folder")

    save("script /x.py", Profile((A,)))

    assert "no folder" == cache.read_text()


def test_the_folder_does_not_grow_without_end(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_profile, "_MOST_FILES", 3)

    for number in range(6):
        save(f"script /{number}.py", Profile((A,)))

    assert 3 == len(list(cache.iterdir()))
    assert (A,) == load("script /5.py").imports


@pytest.mark.parametrize("step", ["tempfile.mkstemp", "json.dumps", "os.replace", "os.scandir"])
def test_a_launcher_that_dies_while_it_writes_leaves_the_old_profile_or_the_new_one(
    step: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule: and what it leaves lying about is removed in time."""
    old, new = Profile((A,)), Profile((A, B))
    save("script /x.py", old)
    program = f"""
import json, os, sys, tempfile
from elasticlib.workers import _profile
from elasticlib.workers.child._import_notes import Import
{step} = lambda *args, **options: os.kill(os.getpid(), 9)
_profile.save("script /x.py", _profile.Profile(tuple(Import(each, f"/lib/{{each}}.py") for each in "ab")))
"""
    died = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)

    assert -signal.SIGKILL == died.returncode
    assert (new if step == "os.scandir" else old) == load("script /x.py")
    monkeypatch.setattr(_profile, "_MOST_FILES", 2)
    for number in range(3):
        save(f"script /{number}.py", new)
    assert 2 == len(list(cache.iterdir()))
