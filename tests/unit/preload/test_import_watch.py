"""Which imports of a restart are counted, how long the worker is asked, and what the job advises at its end."""

from __future__ import annotations

import pytest

from elasticlib import records
from elasticlib.preload._import_watch import EVERY, FIRST, MOST_UNKNOWN, ImportWatch, imported

SITE = "/venv/lib/python3.11/site-packages"
IMPORTER = ("<frozen importlib._bootstrap>", "_call_with_frames_removed")
SCRIPT = ("/home/me/train.py", "<module>")
OWN = ("/home/me/models.py", "<module>")
START = ("/src/elasticlib/workers/child/_child.py", "_run_main")


def stacks(*frames: tuple[str, str]) -> str:
    """Return the fault handler's text for a thread with *frames*, the outermost first."""
    lines = [f'  File "{file}", line 7 in {function}' for file, function in reversed(frames)]
    return "\n".join(["Current thread 0x00007f3c (most recent call first):", *lines, ""])


def package(path: str) -> tuple[str, str]:
    return f"{SITE}/{path}", "<module>"


LIBRARY = stacks(START, SCRIPT, IMPORTER, package("pandas/__init__.py"))


@pytest.mark.parametrize(
    ("frames", "module"),
    [
        ([SCRIPT, IMPORTER, package("pandas/__init__.py"), IMPORTER, package("numpy/__init__.py")], "pandas"),
        ([SCRIPT, IMPORTER, OWN, IMPORTER, package("pandas/__init__.py")], "pandas"),
        ([SCRIPT, IMPORTER, package("google/cloud/storage/__init__.py")], "google.cloud.storage"),
        ([SCRIPT, (f"{SITE}/big/lazy.py", "get"), IMPORTER, package("big/trainer.py")], "big.trainer"),
        ([SCRIPT, IMPORTER, package("lightning/__init__.py"), IMPORTER, package("torchmetrics.py")], "torchmetrics"),
        ([SCRIPT, IMPORTER, OWN], ""),
        ([SCRIPT, IMPORTER, ("/usr/lib/python3.11/asyncio/__init__.py", "<module>")], ""),
        ([SCRIPT, (f"{SITE}/torch/optim/sgd.py", "step")], ""),
        ([("<frozen runpy>", "_run_code"), package("tool/__main__.py")], ""),
    ],
    ids=["package", "by-own", "namespace", "lazy", "refused", "own", "standard", "none", "main"],
)
def test_the_outermost_installed_module_at_whose_import_it_is_is_named(
    frames: list[tuple[str, str]], module: str
) -> None:
    assert module == imported(stacks(START, *frames))


@pytest.mark.parametrize("text", ["", "(no answer)", "(the process has ended)"])
def test_no_answer_names_no_import(text: str) -> None:
    assert "" == imported(text)


def query_times(watch: ImportWatch, start: float, answers: list[str]) -> list[float]:
    """Seconds after *start* at which *watch* asks a worker that gives *answers*, while it asks."""
    times = list[float]()
    for text in answers:
        due = watch.due_in(start)
        if due is None:
            break
        for now in (start + due - 0.01, start + due, start + due + 9):
            watch.tend(lambda now=now: times.append(now - start), now)  # type: ignore[misc]
        watch.note_answer(text)
    return times


def restart(preload: tuple[str, ...] = ("torch",)) -> ImportWatch:
    """The watch of a launch whose workers were just started again."""
    watch = ImportWatch()
    watch.begin(preload, 10.0)
    watch.begin(preload, 20.0)
    return watch


def test_restarted_worker_is_queried_until_no_import_is_running() -> None:
    watch = restart()
    times = query_times(watch, 20.0, [LIBRARY, LIBRARY, stacks(START, SCRIPT), LIBRARY])

    assert [FIRST, FIRST + EVERY, FIRST + 2 * EVERY] == times
    assert records.PreloadAdvised(("pandas",), FIRST + EVERY, ("torch",)) == watch.advice()


def test_a_worker_that_sleeps_is_looked_for_a_few_times_in_a_row() -> None:
    unknown = ["", "(no answer)"]
    times = query_times(restart(), 20.0, [*unknown, LIBRARY, *unknown, "", LIBRARY])

    assert [FIRST + looks * EVERY for looks in range(3 + MOST_UNKNOWN)] == times


def test_the_longest_imports_are_named_first() -> None:
    watch = restart()
    query_times(watch, 20.0, [stacks(SCRIPT, IMPORTER, package(f"{name}.py")) for name in "accbccdef"])

    advice = watch.advice()

    assert advice is not None
    assert ("c", "a", "b") == advice.modules
    assert FIRST + 5 * EVERY == advice.seconds


def test_the_first_start_is_not_watched_nor_a_restart_without_preload() -> None:
    first = ImportWatch()
    first.begin(("torch",), 10.0)

    assert first.due_in(10.0) is None
    assert restart(()).due_in(20.0) is None
    assert first.advice() is None


def test_answer_that_arrives_after_the_next_start_is_not_counted() -> None:
    watch = restart()
    watch.tend(list, 20.0 + FIRST)
    watch.begin(("torch",), 30.0)
    watch.note_answer(LIBRARY)

    assert watch.advice() is None
    assert FIRST == watch.due_in(30.0)


def test_worker_that_is_being_stopped_is_not_queried() -> None:
    watch = restart()
    watch.rest()

    assert watch.due_in(20.0) is None


def test_a_restart_of_short_imports_keeps_what_an_earlier_one_has_shown() -> None:
    watch = restart()
    query_times(watch, 20.0, [LIBRARY])
    watch.begin(("torch",), 30.0)
    query_times(watch, 30.0, [""])

    assert records.PreloadAdvised(("pandas",), FIRST, ("torch",)) == watch.advice()
