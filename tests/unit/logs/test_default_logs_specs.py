"""The default log specification: folders per launch and per round, refusals, temporary folders."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import ConfigError, LogDirError
from elasticlib.job._output import JobLogs
from elasticlib.logs import DefaultLogsSpecs, _specs
from elasticlib.logs._old_folders import holds_something
from elasticlib.spec import Std


def envs(workers: int = 2, run_id: str = "job", restart: int = 0) -> dict[int, dict[str, str]]:
    one = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restart)}
    return {rank: dict(one) for rank in range(workers)}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_constructing_and_checking_makes_nothing(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "a" / "b"), redirects=Std.ALL)
    specs.check()

    assert [] == list(tmp_path.iterdir())
    assert str(tmp_path / "a" / "b") == specs.root_log_dir


def test_a_round_has_one_folder_per_worker_with_empty_stream_files(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT, tee={1: Std.ERR})

    dest = specs.reify(envs())

    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    plain = [re.sub(r"job_[^/]+", "job_X", name) for name in names]
    assert [f"logs/job_X/attempt_0/{name}" for name in ("0/stdout.log", "1/stderr.log", "1/stdout.log")] == plain
    assert all(os.path.getsize(tmp_path / name) == 0 for name in names)
    assert dest.tee_stderrs == dest.stderrs
    assert os.path.dirname(dest.error_files[1]) == os.path.dirname(dest.stdouts[1])


def test_paths_are_absolute_where_the_log_folder_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    dest = DefaultLogsSpecs("logs", redirects=Std.OUT).reify(envs(1))

    assert dest.stdouts[0].startswith(str(tmp_path / "logs"))
    assert os.path.isabs(dest.error_files[0])


def test_the_callers_environments_are_not_changed(tmp_path: Path) -> None:
    given = envs()

    DefaultLogsSpecs(str(tmp_path)).reify(given)

    assert envs() == given


def test_a_restart_has_its_own_folder_in_the_launchs_folder(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))

    first, second = specs.reify(envs(restart=0)), specs.reify(envs(restart=1))

    assert first.error_files[0].replace("attempt_0", "attempt_1") == second.error_files[0]


def test_a_round_with_the_same_restart_count_keeps_the_earlier_logs(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT)
    first = specs.reify(envs())
    Path(first.stdouts[0]).write_text("kept")

    second = specs.reify(envs())

    assert "kept" == Path(first.stdouts[0]).read_text()
    assert first.stdouts[0].replace("attempt_0", "attempt_0.1") == second.stdouts[0]


def test_a_round_survives_that_the_launchs_folder_was_cleaned_away(temporary: Path) -> None:
    specs = DefaultLogsSpecs(redirects=Std.OUT)
    specs.reify(envs())
    shutil.rmtree(specs.root_log_dir)

    dest = specs.reify(envs(restart=1))

    assert os.path.isfile(dest.stdouts[1])


def test_another_run_id_begins_another_launch_folder(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))

    specs.reify(envs(run_id="a"))
    specs.reify(envs(run_id="b/../c d"))

    assert ["a", "b_.._c_d"] == sorted(re.sub("_.{8}$", "", path.name) for path in tmp_path.iterdir())


def test_launches_at_the_same_time_have_folders_of_their_own(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "made" / "once"), redirects=Std.ALL)

    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(lambda _: specs.for_launch().reify(envs()), range(32)))

    assert 64 == len({path for plan in plans for path in plan.stdouts.values()})
    assert 32 == len(list((tmp_path / "made" / "once").iterdir()))


def test_copy_for_a_launch_keeps_the_class_and_the_options() -> None:
    class Own(DefaultLogsSpecs):
        pass

    specs = Own(None, Std.OUT, {0: Std.ERR}, [0])

    assert type(specs.for_launch()) is Own
    assert specs == specs.for_launch()


def test_specifications_are_equal_if_their_options_are_equal() -> None:
    specs = DefaultLogsSpecs("/logs", Std.OUT)

    assert specs == copy.deepcopy(specs) == pickle.loads(pickle.dumps(specs))
    assert specs != DefaultLogsSpecs("/logs", Std.ERR)
    assert specs != DefaultLogsSpecs("/other", Std.OUT)
    assert specs != "/logs"


def test_representation_names_all_options() -> None:
    text = repr(DefaultLogsSpecs("/logs", Std.OUT, {1: Std.ERR}, [1]))

    assert text.startswith("DefaultLogsSpecs(log_dir='/logs'")
    assert "local_ranks_filter={1}" in text


def test_a_log_dir_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()

    with pytest.raises(NotADirectoryError, match=re.escape(repr(str(path)))):
        DefaultLogsSpecs(path).check()
    with pytest.raises(LogDirError, match=re.escape(repr(str(path)))):
        DefaultLogsSpecs(path).reify(envs())


@pytest.mark.parametrize("name", ["file/below", "dangling", "nul\0"])
def test_a_log_dir_that_cannot_become_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    specs = DefaultLogsSpecs(str(tmp_path / name))

    with pytest.raises(LogDirError):
        specs.check()
    with pytest.raises(LogDirError):
        specs.reify(envs())


def test_a_log_dir_beside_the_target_of_a_link_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to("target/folder")
    monkeypatch.chdir(tmp_path)
    specs = DefaultLogsSpecs("link/../logs")

    specs.reify(envs())

    assert (tmp_path / "target" / "logs").is_dir()
    assert not (tmp_path / "logs").exists()


def test_a_log_dir_below_a_folder_that_was_removed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()

    with pytest.raises(ConfigError, match=f"the working directory {folder}"):
        DefaultLogsSpecs("logs").check()


def test_a_log_dir_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not bind root, as which tests may run.
    monkeypatch.setattr(os, "access", lambda *_, **__: False)

    with pytest.raises(LogDirError, match="cannot be written"):
        DefaultLogsSpecs(str(tmp_path / "new")).check()


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any folder for temporary files."""

    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "none of these can be written")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)


@pytest.mark.parametrize(
    "specs",
    [
        DefaultLogsSpecs(redirects=Std.ERR),
        DefaultLogsSpecs(redirects={1: Std.OUT}),
        DefaultLogsSpecs(tee=Std.OUT),
        JobLogs(),
    ],
    ids=repr,
)
def test_streams_without_a_temporary_folder_are_refused(specs: DefaultLogsSpecs, read_only: None) -> None:
    with pytest.raises(LogDirError, match="TMPDIR"):
        specs.check()


def test_without_a_temporary_folder_workers_have_no_error_files(read_only: None) -> None:
    specs = DefaultLogsSpecs()
    specs.check()
    specs.make_ready("job")
    dest = specs.reify(envs())
    specs.put_away(succeeded=False)

    assert {0: "", 1: ""} == dest.error_files
    assert ({}, {}, "") == (dest.stdouts, dest.stderrs, dest.filtered_stdout)
    assert (False, "") == (specs.has_files(), specs.root_log_dir)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_temporary_folder_that_turned_unwritable_costs_error_files_only(
    number: int, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place was found when it could be written; it cannot be any more."""

    def refuse(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)

    assert {0: "", 1: ""} == DefaultLogsSpecs().reify(envs()).error_files
    with pytest.raises(LogDirError, match=os.strerror(number)):
        DefaultLogsSpecs(redirects=Std.OUT).reify(envs())


def test_lack_of_descriptors_is_an_error_also_without_log_files(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)

    with pytest.raises(LogDirError, match="ulimit -n"):
        DefaultLogsSpecs().reify(envs())


def test_without_a_log_dir_the_first_round_makes_a_temporary_folder(temporary: Path) -> None:
    specs = DefaultLogsSpecs()
    before = specs.root_log_dir, list(temporary.iterdir())

    specs.reify(envs())
    specs.reify(envs())

    assert ("", []) == before
    assert [specs.root_log_dir] == [str(path) for path in temporary.iterdir()]
    assert os.path.basename(specs.root_log_dir).startswith("torchelastic_")


def test_temporary_folder_is_removed_and_created_for_the_next_launch(temporary: Path) -> None:
    specs = DefaultLogsSpecs()
    specs.reify(envs())

    specs.remove_if_temporary()
    was_removed = not any(temporary.iterdir())
    dest = specs.reify(envs())

    assert was_removed
    assert os.path.isdir(os.path.dirname(dest.error_files[0]))


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        ({"redirects": Std.ALL}, True),
        ({"tee": {1: Std.OUT}}, True),
        ({"redirects": {0: Std.NONE}}, False),
        ({}, False),
    ],
    ids=["redirected", "tee'd", "nothing redirected", "nothing said"],
)
def test_temporary_folder_stays_after_success_for_redirected_streams_only(
    temporary: Path, options: dict[str, Any], stays: bool
) -> None:
    specs = DefaultLogsSpecs(**options).for_launch()
    specs.reify(envs())

    specs.put_away(succeeded=True)

    assert stays == bool(specs.kept_temporary_folder())
    assert [specs.kept_temporary_folder()] * stays == [str(path) for path in temporary.iterdir()]


@pytest.mark.parametrize("trouble", [FileNotFoundError, PermissionError])
def test_a_file_that_cannot_be_looked_at_may_hold_something(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, trouble: type[OSError]
) -> None:
    specs = DefaultLogsSpecs(redirects=Std.ALL)
    specs.reify(envs())

    def fails(path: str) -> os.stat_result:
        raise trouble(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", fails)
        specs.remove_if_temporary(only_if_empty=True)

    assert [specs.root_log_dir] == [str(path) for path in temporary.iterdir()]


def test_a_folder_that_cannot_be_listed_may_hold_something(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = DefaultLogsSpecs()
    specs.reify(envs())

    def forbidden(path: str) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", forbidden)
        may_hold = holds_something(specs.root_log_dir)

    assert may_hold
    assert not holds_something(specs.root_log_dir)


def test_a_temporary_folder_that_somebody_removed_is_forgotten(temporary: Path) -> None:
    specs = DefaultLogsSpecs()
    specs.reify(envs())
    shutil.rmtree(specs.root_log_dir)

    specs.remove_if_temporary(only_if_empty=True)

    assert "" == specs.root_log_dir


def test_a_rounds_temporary_logs_go_and_those_of_others_stay(temporary: Path) -> None:
    specs = DefaultLogsSpecs()
    specs.reify(envs())
    first = specs.temporary_round()
    specs.reify(envs())
    second = specs.temporary_round()

    specs.remove_round(first)
    between = os.path.isdir(first), os.path.isdir(second)
    specs.remove_round(second)

    assert between == (False, True)
    assert list(temporary.iterdir()) == []
    assert specs.root_log_dir == ""


def test_requested_folder_is_never_removed(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))
    dest = specs.reify(envs())

    specs.remove_if_temporary()

    assert specs.temporary_round() == ""
    assert os.path.isdir(os.path.dirname(dest.error_files[0]))


def test_the_null_device_keeps_no_files(temporary: Path) -> None:
    specs = DefaultLogsSpecs(os.devnull, Std.ALL, Std.ALL)
    specs.check()
    specs.make_ready("job")
    specs.forget_unused()

    dest = specs.reify(envs())

    assert {0: "", 1: ""} == dest.error_files
    assert {} == dest.stdouts == dest.tee_stderrs
    assert [] == list(temporary.iterdir())


def test_no_workers_make_no_streams(tmp_path: Path) -> None:
    assert {} == DefaultLogsSpecs(str(tmp_path), Std.ALL).reify({}).stdouts


def modes(*folders: Path) -> list[str]:
    return [oct(folder.stat().st_mode & 0o777) for folder in folders]


@pytest.mark.parametrize("named", [True, False])
def test_recreated_folders_are_private_to_the_user(temporary: Path, named: bool) -> None:
    specs = DefaultLogsSpecs(str(temporary / "above" / "logs") if named else None, redirects=Std.ALL)
    base = Path(specs.reify(envs()).stdouts[0]).parents[3]
    shutil.rmtree(temporary / "above" if named else base)

    again = Path(specs.reify(envs(restart=1)).stdouts[0])

    assert base == again.parents[3]
    assert ["0o700"] * 2 == modes(base, again.parents[2])
    assert not named or ["0o700"] == modes(base.parent)
    assert named or (base / ".elasticlib").exists()  # it may go one day, as the first one


@pytest.mark.parametrize("link", [True, False])
def test_a_temporary_folder_that_somebody_else_has_put_there_is_not_taken(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    specs = DefaultLogsSpecs(redirects=Std.ALL)
    base = Path(specs.reify(envs()).stdouts[0]).parents[3]
    shutil.rmtree(base)
    (temporary / "theirs").mkdir()
    if link:
        base.symlink_to(temporary / "theirs")
    else:
        base.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: base.stat().st_uid + 1)

    again = Path(specs.reify(envs(restart=1)).stdouts[0])

    assert base != again.parents[3]
    assert [] == [*(temporary / "theirs").iterdir()]


# before the first round


def test_folder_made_ready_is_used_by_the_following_rounds(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    specs.make_ready("job")
    [made] = (tmp_path / "logs").iterdir()
    empty = list(made.iterdir())
    specs.make_ready("job")

    dest = specs.reify(envs(1))

    assert [] == empty
    assert [made] == list((tmp_path / "logs").iterdir())
    assert dest.stdouts[0].startswith(str(made))


@pytest.mark.parametrize("streams", [{"redirects": Std.OUT}, {"tee": {1: Std.ERR}}], ids=str)
def test_a_folder_without_room_for_streams_is_refused_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: dict[str, Any]
) -> None:
    monkeypatch.setattr(_specs.tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb", buffering=0))
    specs = DefaultLogsSpecs(str(tmp_path), **streams)

    with pytest.raises(LogDirError, match=f"log_dir={str(tmp_path)!r} cannot be used: .*No space left on device"):
        specs.make_ready("job")

    assert [] == list(tmp_path.iterdir())


def test_without_streams_no_room_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_specs.tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb", buffering=0))
    specs = DefaultLogsSpecs(str(tmp_path))

    specs.make_ready("job")

    assert 1 == len(list(tmp_path.iterdir()))


def test_folder_in_which_no_round_began_is_removed(temporary: Path, tmp_path: Path) -> None:
    kept = tmp_path / "asked"
    for specs in (DefaultLogsSpecs(), DefaultLogsSpecs(str(kept))):
        specs.make_ready("job")
        specs.forget_unused()

    assert [kept] == list(temporary.iterdir())
    assert [] == list(kept.iterdir())


def test_a_folder_with_the_logs_of_a_round_stays(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))
    specs.make_ready("job")
    dest = specs.reify(envs(1))
    specs.forget_unused()

    assert os.path.isdir(os.path.dirname(dest.error_files[0]))
