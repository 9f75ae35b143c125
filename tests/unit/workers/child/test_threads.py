"""How many threads a worker computes with, seen with made-up libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from elasticlib.workers.child import _threads


class Library:
    """A library with a thread count; `set` holds the numbers that it was given."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.set: list[int] = []

    def get_num_threads(self) -> int:
        return self.threads

    def set_num_threads(self, count: int) -> None:
        self.threads = count
        self.set.append(count)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library(8)
    monkeypatch.setitem(sys.modules, "torch", library)
    return library


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library(8)
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace())
    monkeypatch.setattr(_threads, "blas_libraries", lambda: [(library.get_num_threads, library.set_num_threads)])
    return library


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})


def test_loaded_libraries_are_told_the_number(torch: Library, blas: Library) -> None:
    _threads.apply(3)

    assert (torch.set, blas.set) == ([3], [3])


def test_libraries_that_compute_with_this_number_are_left_alone(torch: Library, blas: Library) -> None:
    torch.threads = blas.threads = 3

    _threads.apply(3)

    assert (torch.set, blas.set) == ([], [])


def test_more_threads_than_cpus_are_not_used(torch: Library, blas: Library) -> None:
    _threads.apply(16)

    assert (torch.threads, blas.threads) == (4, 4)


def test_libraries_that_are_not_loaded_are_not_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "numpy"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    _threads.apply(2)

    assert not {"torch", "numpy"} & sys.modules.keys()


@pytest.fixture
def watched(torch: Library, blas: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a forked worker whose fork server has loaded torch, and nothing of its lazy parts."""
    monkeypatch.setenv("TORCH_TRACE", "")  # so that it is as before when the test is over
    monkeypatch.delenv("TORCH_TRACE")
    for name in ("TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND"):
        monkeypatch.setenv(name, "")
    for name in ("torch._dynamo", "torch._inductor.config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(os, "putenv", os.putenv)  # put back afterwards
    _threads.watch_environment()
    yield


def as_the_program(code: str, name: str = "__main__") -> None:
    """Run *code* as if module *name* did."""
    exec(f"import os\n{code}", {"__name__": name})


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.usefixtures("watched")
def test_a_thread_count_that_is_set_late_is_obeyed(
    variable: str, torch: Library, blas: Library, capfd: pytest.CaptureFixture[str]
) -> None:
    as_the_program(f"os.environ[{variable!r}] = '2'")

    assert (os.environ[variable], torch.threads, blas.threads) == ("2", 2, 2)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("value", ["", "0", "many", "4,2"])
@pytest.mark.usefixtures("watched")
def test_a_thread_count_that_is_none_changes_nothing(value: str, torch: Library) -> None:
    as_the_program(f"os.environ['OMP_NUM_THREADS'] = {value!r}")

    assert torch.set == []
    assert os.environ["OMP_NUM_THREADS"] == value


@pytest.mark.parametrize(
    "code",
    [
        "os.environ['TORCH_LOGS'] = 'all'",
        "os.environ.setdefault('TORCH_TRACE', 'all')",
        "os.putenv('TORCH_LOGS', 'all')",
        "os.environ['OMP_PROC_BIND'] = 'all'",
    ],
)
@pytest.mark.usefixtures("watched")
def test_a_setting_that_comes_too_late_is_named(code: str, capfd: pytest.CaptureFixture[str]) -> None:
    as_the_program(code)

    said = capfd.readouterr().err
    assert [name for name in ("TORCH_LOGS", "TORCH_TRACE", "OMP_PROC_BIND") if name in code and name in said]
    assert "had read it" in said


@pytest.mark.parametrize("code", ["os.environ.update(TORCH_LOGS='all')", "os.environ |= {'TORCH_LOGS': 'all'}"])
@pytest.mark.usefixtures("watched")
def test_a_setting_among_others_that_comes_too_late_is_named(code: str, capfd: pytest.CaptureFixture[str]) -> None:
    as_the_program(code)

    assert "had read it" in capfd.readouterr().err


@pytest.mark.usefixtures("watched")
def test_a_setting_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    as_the_program("os.environ['TORCH_LOGS'] = 'all'\nos.environ['TORCH_LOGS'] = 'none'")

    assert capfd.readouterr().err.count("TORCH_LOGS") == 1


@pytest.mark.usefixtures("watched")
def test_what_a_library_sets_is_not_spoken_of(capfd: pytest.CaptureFixture[str]) -> None:
    as_the_program("os.environ['TORCH_LOGS'] = 'all'", name="some.library")

    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("watched")
def test_a_setting_of_a_part_that_is_not_loaded_yet_will_be_read(capfd: pytest.CaptureFixture[str]) -> None:
    as_the_program("os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/tmp/cache'")

    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("watched")
def test_other_variables_are_set_as_ever(torch: Library, capfd: pytest.CaptureFixture[str]) -> None:
    as_the_program("os.environ['TORCH_LOGS_OF_MINE'] = '1'\ndel os.environ['TORCH_LOGS_OF_MINE']")

    assert "TORCH_LOGS_OF_MINE" not in os.environ
    assert (torch.set, capfd.readouterr().err) == ([], "")


def test_a_process_without_openblas_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _threads.blas_libraries.cache_clear()
    monkeypatch.setattr("builtins.open", lambda *args, **options: _Lines("7f00-7f01 r-xp 0 08:01 7   /lib/libc.so.6\n"))

    found = _threads.blas_libraries()

    monkeypatch.undo()
    _threads.blas_libraries.cache_clear()
    assert found == []


class _Lines(list[str]):
    def __init__(self, text: str) -> None:
        super().__init__(text.splitlines(keepends=True))

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *error: object) -> None: ...
