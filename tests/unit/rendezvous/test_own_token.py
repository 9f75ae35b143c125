"""The token that launches of one user share on loopback, and that nobody else can read, make or replace."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticlib.rendezvous import _own_token
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous._own_token import read_or_make, token_of, tokens_of_server

USER = os.geteuid()


def job(endpoint: str = "localhost:29400", backend: str = "c10d", **fields: object) -> NodeJob:
    return NodeJob(run_id="none", node="n/1", backend=backend, endpoint=endpoint, **fields)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_own_token, "_home", lambda user: str(tmp_path))
    monkeypatch.setattr(_own_token, "_warned", set())
    return tmp_path


@pytest.mark.parametrize("endpoint", ["localhost:29400", "127.0.0.1:1", "[::1]:29400"])
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_loopback_jobs_of_one_user_share_a_token(endpoint: str, backend: str, home: Path) -> None:
    token = token_of(job(endpoint, backend), {})

    assert token is not None and token == token_of(job("127.0.0.1"), {})
    assert 0o600 == stat.S_IMODE((home / ".cache/elasticlib/token").stat().st_mode)


@pytest.mark.parametrize(
    "other",
    [
        job("node0:29400"),
        job("0.0.0.0:29400"),
        job("10.0.0.1:29400", "static"),
        job("/tmp/file", store_type="file"),
        job(is_host=True),
        job(is_host=False),
        job("localhost:2379", "etcd"),
    ],
)
def test_jobs_that_other_machines_may_reach_get_none(other: NodeJob, home: Path) -> None:
    assert token_of(other, {}) is None
    assert [] == list(home.iterdir())


def test_token_of_configuration_or_variable_counts_and_empty_is_none() -> None:
    assert "given" == token_of(job(token="given"), {"ELASTICLIB_TOKEN": "other"})
    assert "other" == token_of(job(), {"ELASTICLIB_TOKEN": "other"})
    assert token_of(job(), {"ELASTICLIB_TOKEN": ""}) is None


def test_launches_at_once_find_one_token(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / str(number) / "token"
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _, path=path: read_or_make(path, USER), range(8)))
        assert 1 == len(found)
        assert ["token"] == os.listdir(path.parent)


def make_link(path: Path) -> None:
    (path.parent / "target").write_text("a" * 64)
    (path.parent / "target").chmod(0o600)
    path.symlink_to("target")


def make_readable(path: Path) -> None:
    path.write_text("a" * 64)
    path.chmod(0o644)


def make_damaged(path: Path) -> None:
    path.write_text("a")
    path.chmod(0o600)


@pytest.mark.parametrize("make", [make_link, make_readable, make_damaged, Path.mkdir])
def test_file_of_another_kind_is_refused_once(make: object, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = home / ".cache" / "elasticlib" / "token"
    path.parent.mkdir(parents=True)
    make(path)  # type: ignore[operator]

    assert [None, None] == [token_of(job(), {}), token_of(job(), {})]
    [line] = caplog.messages
    assert str(path) in line and "set ELASTICLIB_TOKEN" in line


def test_file_of_another_user_is_refused(home: Path) -> None:
    path = home / "token"
    read_or_make(path, USER)

    with pytest.raises(ValueError, match="is not a file that only user"):
        read_or_make(path, USER + 1)


def test_home_that_cannot_be_written_means_no_token(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / ".cache").write_text("a file")

    assert token_of(job(), {}) is None
    assert 1 == len(caplog.messages)


def test_server_takes_the_variables_token_else_its_users_or_none() -> None:
    own = token_of(job(), {})

    assert (own, None) == tokens_of_server({})
    assert ("given",) == tokens_of_server({"ELASTICLIB_TOKEN": "given"})
    assert (None,) == tokens_of_server({"ELASTICLIB_TOKEN": ""})


def test_server_without_a_token_file_takes_jobs_without_a_token(home: Path) -> None:
    (home / ".cache").touch()

    assert (None,) == tokens_of_server({})
