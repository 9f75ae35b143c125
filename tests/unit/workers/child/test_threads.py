"""Number of threads that a worker computes with, tested with made-up libraries."""

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


@pytest.mark.parametrize(
    ("before", "count", "calls"), [(8, 3, [3]), (3, 3, []), (8, 16, [4])], ids=["another", "the same", "above the CPUs"]
)
def test_loaded_libraries_get_the_number(
    before: int, count: int, calls: list[int], torch: Library, blas: Library
) -> None:
    torch.threads = blas.threads = before

    _threads.set_blas_threads(count)

    assert (torch.set, blas.set) == (calls, calls)


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
