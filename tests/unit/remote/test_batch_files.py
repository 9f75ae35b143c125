"""The files of a call on a batch system: what strangers have written there is not read."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from elasticlib.errors import ConfigError
from elasticlib.remote._batch_files import BatchFolder, Submission, SubmissionFacts, link_of, result_name

RECORD = SubmissionFacts(2, "train", "worker", is_step=False)


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    return BatchFolder.made(str(tmp_path), "train", None, RECORD)


def test_folder_and_its_files_are_for_this_user_alone(folder: BatchFolder) -> None:
    folder.write("call", b"bytes")

    assert b"bytes" == folder.read("call")
    assert 0o700 == os.stat(folder.path).st_mode & 0o777
    assert {0o600} == {os.stat(folder.file(name)).st_mode & 0o777 for name in os.listdir(folder.path)}
    assert folder.token.encode() not in Path(folder.file("call")).read_bytes()


def test_file_that_cannot_be_written_leaves_nothing(folder: BatchFolder) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        with pytest.raises(OSError, match="File too large"):
            folder.write("call", bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)

    assert ["submission.json"] == os.listdir(folder.path)


def test_another_client_finds_token_and_record(folder: BatchFolder) -> None:
    assert (folder, RECORD) == BatchFolder.found(folder.path)


@pytest.mark.parametrize("size", [0, 10, 31, 32, 33, 100])
def test_bytes_without_the_code_are_refused(folder: BatchFolder, size: int) -> None:
    Path(folder.file("call")).write_bytes(b"x" * size)

    with pytest.raises(ValueError, match="was not written by this job"):
        folder.read("call")


def test_result_of_another_run_node_or_job_is_refused(folder: BatchFolder) -> None:
    folder.write(result_name(0, 1), b"data")
    for name in (result_name(0, 0), result_name(1, 1)):
        os.link(folder.file(result_name(0, 1)), folder.file(name))
        with pytest.raises(ValueError, match="was not written by this job"):
            folder.read(name)
    with pytest.raises(ValueError, match="was not written by this job"):
        BatchFolder(folder.path, "another token").read(result_name(0, 1))


def test_pipes_and_links_are_not_read(folder: BatchFolder) -> None:
    os.mkfifo(folder.file("pipe"))
    os.symlink("/dev/zero", folder.file("link"))

    for name in ("pipe", "link"):
        with pytest.raises((OSError, ValueError)):
            folder.read(name)


def test_results_are_listed_by_run_and_node(folder: BatchFolder) -> None:
    for name in ("result.0.1", "result.12.3", "result.x.1", "result.0.1.tmp", ".result.0.1", "output"):
        folder.write_text(name, "")

    assert {(0, 1): "result.0.1", (12, 3): "result.12.3"} == folder.results()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": "x"}', "\xff"])
def test_broken_record_is_refused(folder: BatchFolder, text: str) -> None:
    folder.write_text("submission.json", text)

    with pytest.raises(ConfigError, match="is not the folder of a call"):
        BatchFolder.found(folder.path)


def test_record_that_others_can_write_is_refused(folder: BatchFolder) -> None:
    os.chmod(folder.file("submission.json"), 0o602)

    with pytest.raises(ConfigError, match="can be read or written by other users"):
        BatchFolder.found(folder.path)


def test_link_leads_to_the_folder_until_it_is_removed(
    folder: BatchFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    first, second = Submission(folder, RECORD, "7"), Submission(BatchFolder(str(tmp_path), ""), RECORD, "7")

    second.note()
    first.note()
    assert folder.path == os.readlink(link_of("7"))
    folder.check_number("7")
    with pytest.raises(ConfigError, match="is the folder of job 7"):
        folder.check_number("8")
    first.remove()

    assert not os.path.lexists(link_of("7"))
    assert not os.path.exists(folder.path)
