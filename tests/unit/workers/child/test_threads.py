"""How many threads a worker computes with, seen with made-up libraries."""

from __future__ import annotations

import os
import sys
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
    _threads.set_blas_threads(3)

    assert (torch.set, blas.set) == ([3], [3])


def test_libraries_that_compute_with_this_number_are_left_alone(torch: Library, blas: Library) -> None:
    torch.threads = blas.threads = 3

    _threads.set_blas_threads(3)

    assert (torch.set, blas.set) == ([], [])


def test_more_threads_than_cpus_are_not_used(torch: Library, blas: Library) -> None:
    _threads.set_blas_threads(16)

    assert (torch.threads, blas.threads) == (4, 4)


def test_libraries_that_are_not_loaded_are_not_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "numpy"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    _threads.set_blas_threads(2)

    assert not {"torch", "numpy"} & sys.modules.keys()


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
