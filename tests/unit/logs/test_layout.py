"""Names of log folders, and which stream goes where."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, strategies as st

from elasticlib.logs._layout import DEFAULT_PREFIX, attempt_names, destinations, line_prefix, run_folder_prefix
from elasticlib.spec import Std

selectors = st.sampled_from(list(Std)) | st.dictionaries(st.integers(0, 3), st.sampled_from(list(Std)))
filters = st.none() | st.sets(st.integers(0, 3))


@given(st.text(max_size=400))
def test_any_run_id_makes_one_short_file_name(run_id: str) -> None:
    name = run_folder_prefix(run_id)

    assert name == os.path.basename(name)
    assert "\0" not in name
    assert len(name.encode()) < 200
    assert name not in {"", "_"}


def test_a_plain_run_id_is_kept_in_the_folders_name() -> None:
    assert "job-7.a_" == run_folder_prefix("job-7.a")


def test_a_slash_in_the_run_id_makes_no_folder_of_its_own() -> None:
    assert ".._etc_" == run_folder_prefix("../etc")


def test_rounds_with_the_same_restart_count_get_names_of_their_own() -> None:
    assert ["attempt_1", "attempt_1.1", "attempt_1.2"] == list(itertools.islice(attempt_names("1"), 3))


def test_the_default_prefix_is_role_and_local_rank() -> None:
    assert b"[default2]:" == line_prefix(DEFAULT_PREFIX, role_name="default", rank=10, local_rank=2, hostname="r12i0n8")


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        ("${rank}/${local_rank} ", b"10/2 "),
        ("$role_name|", b"default|"),
        ("${hostname}:${rank}: ", b"r12i0n8:10: "),
        ("${host} ${rank}:", b"${host} 10:"),
        ("100% $", b"100% $"),
        ("$$ ", b"$ "),
        ("é", "é".encode()),
        ("", b""),
    ],
)
def test_a_template_knows_four_names_and_keeps_the_rest(template: str, prefix: bytes) -> None:
    assert prefix == line_prefix(template, role_name="default", rank=10, local_rank=2, hostname="r12i0n8")


def test_stream_without_redirect_has_no_file_and_uses_the_console() -> None:
    plan = destinations("/a", 2, Std.NONE, Std.NONE, None)

    assert {} == plan.stdouts == plan.stderrs == plan.tee_stdouts == plan.tee_stderrs
    assert {0: "/a/0/error.json", 1: "/a/1/error.json"} == plan.error_files


def test_redirect_writes_to_the_file_only() -> None:
    plan = destinations("/a", 2, {1: Std.ERR}, Std.NONE, None)

    assert {1: "/a/1/stderr.log"} == plan.stderrs
    assert {} == plan.stdouts == plan.tee_stdouts == plan.tee_stderrs


def test_a_tee_implies_a_redirect() -> None:
    plan = destinations("/a", 11, Std.NONE, {10: Std.OUT}, None)

    assert {10: "/a/10/stdout.log"} == plan.stdouts == plan.tee_stdouts


def test_redirect_and_tee_of_one_rank_add_up() -> None:
    plan = destinations("/a", 1, Std.ERR, Std.OUT, None)

    assert {0: "/a/0/stdout.log"} == plan.stdouts == plan.tee_stdouts
    assert {0: "/a/0/stderr.log"} == plan.stderrs
    assert {} == plan.tee_stderrs


def test_a_rank_left_out_by_the_filter_is_teed_to_its_file_only() -> None:
    plan = destinations("/a", 2, Std.NONE, Std.ALL, {0})

    assert {0: "/a/0/stdout.log", 1: "/a/1/stdout.log"} == plan.stdouts
    assert {0: "/a/0/stdout.log"} == plan.tee_stdouts
    assert {0: "/a/0/stderr.log"} == plan.tee_stderrs


def test_a_rank_left_out_by_the_filter_loses_what_is_not_redirected() -> None:
    plan = destinations("/a", 2, Std.OUT, Std.NONE, {0})

    assert {0: "/a/0/stdout.log", 1: "/a/1/stdout.log"} == plan.stdouts
    assert {1: os.devnull} == plan.stderrs


def test_without_a_folder_nothing_is_redirected_and_error_files_are_empty() -> None:
    plan = destinations(None, 2, Std.ALL, Std.ALL, {0})

    assert {1: os.devnull} == plan.stdouts == plan.stderrs
    assert {} == plan.tee_stdouts == plan.tee_stderrs
    assert {0: "", 1: ""} == plan.error_files


@given(redirects=selectors, tee=selectors, local_ranks_filter=filters)
def test_the_filter_changes_no_file_and_only_takes_from_the_console(
    redirects: Std | dict[int, Std], tee: Std | dict[int, Std], local_ranks_filter: set[int] | None
) -> None:
    free = destinations("/a", 4, redirects, tee, None)

    plan = destinations("/a", 4, redirects, tee, local_ranks_filter)

    assert free.stdouts == {rank: path for rank, path in plan.stdouts.items() if path != os.devnull}
    assert free.stderrs == {rank: path for rank, path in plan.stderrs.items() if path != os.devnull}
    assert plan.tee_stdouts.items() <= free.tee_stdouts.items()
    assert plan.tee_stderrs.items() <= plan.stderrs.items()
