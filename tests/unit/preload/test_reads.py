"""Which variables ask for another fork server, and which go to the workers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import elasticlib
from elasticlib.preload._reads import (
    INTEL_OPENMP,
    INTERPRETER,
    LIBRARIES,
    LOST_AFTER_IMPORT,
    NOISE,
    OF_WORKERS,
    PER_LAUNCH,
    Reads,
    serves,
)

GIVEN = {"PATH": "/bin", "HOME": "/root", "MY_SIZE": "small"}
ENVIRONMENTS = st.dictionaries(st.sampled_from(["A", "B", "TZ", "_", "OMP_PLACES"]), st.sampled_from("12"))


def reads_of(
    names: Sequence[str] = (),
    preload: Sequence[str] = ("torch",),
    **others: Any,
) -> Reads | None:
    message = {"names": list(names), "named": False, "intel_openmp": False, "whole": False, **others}
    return Reads.of_message(message, preload)


def test_a_variable_that_nobody_read_asks_for_no_new_fork_server() -> None:
    for reads in (reads_of(), reads_of(["LANG"]), reads_of(preload=())):
        assert serves(reads, GIVEN, {**GIVEN, "ELASTICLIB_TEST": "1"})
        assert serves(reads, GIVEN, {**GIVEN, "MY_SIZE": "large"})


@pytest.mark.parametrize("change", [{"MY_SIZE": "large"}, {"MY_SIZE": ""}])
def test_a_variable_that_python_code_read_asks_for_a_new_fork_server(change: dict[str, str]) -> None:
    assert not serves(reads_of(["MY_SIZE"]), GIVEN, {**GIVEN, **change})
    assert not serves(reads_of(["MY_SIZE"]), GIVEN, {name: value for name, value in GIVEN.items() if name != "MY_SIZE"})
    assert serves(reads_of(["MY_SIZE"]), GIVEN, {**GIVEN, "PATH": "/home"})


def test_missing_variable_that_was_read_asks_for_a_new_fork_server() -> None:
    assert not serves(reads_of(["DEBUG"]), GIVEN, {**GIVEN, "DEBUG": ""})


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "PYTHONPATH", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LC_ALL"])
def test_variables_of_the_interpreter_ask_for_any_new_fork_server(name: str) -> None:
    for preload in ((), ("torch",)):
        assert not serves(reads_of(preload=preload), GIVEN, {**GIVEN, name: "1"})


@pytest.mark.parametrize(
    "name",
    "OMP_PLACES GOMP_CPU_AFFINITY MKL_NUM_THREADS OPENBLAS_CORETYPE TORCH_LOGS TORCHDYNAMO_VERBOSE "
    "CUDA_MODULE_LOADING NCCL_DEBUG".split(),
)
def test_variables_of_loaded_libraries_ask_for_a_new_fork_server(name: str) -> None:
    assert not serves(reads_of(), GIVEN, {**GIVEN, name: "1"})
    assert serves(reads_of(preload=()), GIVEN, {**GIVEN, name: "1"})


def test_variables_of_intels_openmp_matter_where_it_is_loaded() -> None:
    changed = {**GIVEN, "KMP_DUPLICATE_LIB_OK": "True"}

    assert serves(reads_of(), GIVEN, changed)
    assert not serves(reads_of(intel_openmp=True), GIVEN, changed)


@pytest.mark.parametrize("name", sorted(PER_LAUNCH))
def test_variables_of_each_launch_ask_for_no_new_fork_server(name: str) -> None:
    changed = {**GIVEN, name: "1"}

    assert serves(reads_of(), GIVEN, changed)
    assert serves(None, GIVEN, changed)
    assert not serves(reads_of([name]), GIVEN, changed)


def test_a_module_that_was_named_may_have_read_any_variable() -> None:
    reads = reads_of(named=True)

    for name in ("MY_SIZE", "CUDA_VISIBLE_DEVICES", "ANYTHING"):
        assert not serves(reads, GIVEN, {**GIVEN, name: "another"})
    for name in OF_WORKERS | NOISE:
        assert serves(reads, GIVEN, {**GIVEN, name: "another"})


def test_the_name_of_the_test_under_way_never_asks_for_a_new_fork_server() -> None:
    changed = {**GIVEN, "PYTEST_CURRENT_TEST": "another"}

    assert serves(reads_of(["PYTEST_CURRENT_TEST"]), GIVEN, changed)


@pytest.mark.parametrize("name", ["_", "PWD", "OLDPWD", "SHLVL", "LINES", "COLUMNS", "PYTEST_CURRENT_TEST"])
def test_while_reads_are_unknown_all_other_variables_matter(name: str) -> None:
    for reads in (None, reads_of(whole=True)):
        assert serves(reads, GIVEN, {**GIVEN, name: "1"})
        assert not serves(reads, GIVEN, {**GIVEN, "ELASTICLIB_TEST": "1"})


def test_all_variables_matter_if_fork_server_reports_no_reads() -> None:
    assert None is Reads.of_message({"op": "ready"}, ("torch",))


@given(ENVIRONMENTS, ENVIRONMENTS)
def test_serving_an_environment_is_symmetric(one: dict[str, str], other: dict[str, str]) -> None:
    for reads in (None, reads_of(["A"]), reads_of(named=True)):
        assert serves(reads, one, dict(reversed(one.items())))
        assert serves(reads, one, other) == serves(reads, other, one)


def test_the_lists_are_those_of_the_documentation() -> None:
    page = (Path(elasticlib.__file__).parent / "docs" / "fork_server.md").read_text(encoding="utf-8")
    before, text = page.split("### Which variables are read")
    text = text.partition("\n## ")[0]
    rows = [line.split("|")[2].split("`")[1::2] for line in text.splitlines() if line.startswith("| ")][1:]

    assert [{*INTERPRETER, "HOME"}, {*LIBRARIES}, {*INTEL_OPENMP}] == [set(row) for row in rows]
    assert all(f"`{name}`" in text for name in (*PER_LAUNCH, "PYTEST_CURRENT_TEST"))
    assert "PYTEST_CURRENT_TEST" in NOISE
    assert all(f"`{name}`" in before for name in LOST_AFTER_IMPORT)
