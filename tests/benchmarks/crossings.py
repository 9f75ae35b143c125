"""
Count of calls that pass arguments and results from one module of the package to another.

``python -m tests.benchmarks.crossings`` launches a function in one worker. Its argument is a text
that occurs nowhere else; it returns another such text. `sys.setprofile` in every process and thread
of the job sees each call. A call counts if the function is in another module of the package than
its caller, and the text is in its arguments. ``self`` is not searched. The text may be plain,
pickled, or inside another object. Repeated calls of one function, such as a poll, count once. A
wait for an object's descriptor does not count, even if the object holds the text.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from attrs import frozen

DOWN, BACK = "-".join(("needle", "goes", "down")), "-".join(("needle", "comes", "back"))  # not in the text of this file
FLOWS = {"arguments down": DOWN, "results back": BACK}
_FOLDER = "ELASTICLIB_CROSSINGS"
_MODULES = ("elasticlib", "tests.benchmarks.crossings")
"""The package, and the job."""
_WAIT = "elasticlib.processes._wire.wait_readable"
_DEEP = 6
"""Objects that hold one another on the way to the text."""
ROOT = Path(__file__).resolve().parents[2]


@frozen
class Crossing:
    """One function of another module that was called; `pid` is that of the process."""

    pid: str
    caller: str
    callee: str


def take(text: str) -> str:
    """Check the argument and return the result: the function that the worker runs."""
    if text != DOWN:
        raise ValueError(f"it got {text!r}")
    return BACK


def holds(value: Any, text: str, deep: int = _DEEP) -> bool:
    """Return whether *value* contains the text."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, (bytes, bytearray)):
        return text.encode() in value
    if isinstance(value, memoryview):
        return text.encode() in bytes(value)
    if deep == 0 or isinstance(value, (type, FrameType)):
        return False
    if isinstance(value, Mapping):
        return any(holds(each, text, deep - 1) for each in value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(holds(each, text, deep - 1) for each in value)
    if type(value).__module__.startswith("elasticlib") and not callable(value):
        names = {*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())} - {"__weakref__"}
        return any(holds(getattr(value, name, None), text, deep - 1) for name in names)
    return False


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


class _Profiler:
    """Writes down each crossing of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._busy = threading.local()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        callee = _module(frame)
        if event != "call" or not callee.startswith(_MODULES) or getattr(self._busy, "now", False):
            return
        caller = frame.f_back
        while caller is not None and not _module(caller).startswith(_MODULES):
            caller = caller.f_back  # through the standard library and attrs
        name = frame.f_code.co_name
        if _module(caller) == callee or name.startswith("<") or f"{callee}.{name}" == _WAIT:
            return
        if not frame.f_code.co_filename.endswith(".py"):  # made by attrs
            return
        self._busy.now = True
        try:
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            given = [frame.f_locals.get(each) for each in code.co_varnames[:count] if each != "self"]
            at = f"{_module(caller)}.{'' if caller is None else caller.f_code.co_name}"
            for flow, text in FLOWS.items():
                if any(holds(each, text) for each in given):
                    with open(self._folder / f"{os.getpid()}", "a", encoding="utf-8") as lines:
                        lines.write(f"{flow}\t{at}\t{callee}.{name}\n")
        finally:
            self._busy.now = False


def install() -> None:
    """Count in this process and those that it forks, if the job is to be counted."""
    if folder := os.environ.get(_FOLDER):
        profiler = _Profiler(Path(folder))
        threading.setprofile(profiler)
        sys.setprofile(profiler)


def count() -> dict[str, list[Crossing]]:
    """Launch the job; the crossings of each flow, by process."""
    with tempfile.TemporaryDirectory(prefix="crossings-") as folder:
        found, site = Path(folder, "found"), Path(folder, "site")
        found.mkdir()
        site.mkdir()
        (site / "sitecustomize.py").write_text("from tests.benchmarks import crossings\ncrossings.install()\n")
        path = os.pathsep.join((str(site), str(ROOT)))
        environment = os.environ | {_FOLDER: str(found), "PYTHONPATH": path}
        subprocess.run(
            [sys.executable, "-c", "from tests.benchmarks.crossings import launch; launch()"],
            check=True, env=environment, cwd=ROOT, timeout=120, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        crossings: dict[str, list[Crossing]] = {flow: [] for flow in FLOWS}
        for file in sorted(found.iterdir(), key=lambda each: int(each.name)):
            for line in file.read_text(encoding="utf-8").splitlines():
                flow, caller, callee = line.split("\t")
                crossings[flow].append(Crossing(file.name, caller, callee))
        return {flow: [*dict.fromkeys(calls)] for flow, calls in crossings.items()}


def launch() -> None:
    """The job."""
    from elasticlib import LaunchConfig, elastic_launch

    (result,) = elastic_launch(LaunchConfig(nproc_per_node=1), take)(DOWN).values()
    if result != BACK:
        raise ValueError(f"it returned {result!r}")


def main() -> int:
    """Print them, and how many there are."""
    crossings = count()
    for flow, calls in crossings.items():
        print(f"{flow}: {len(calls)}")
        for call in calls:
            print(f"  {call.pid:>7}  {call.caller} -> {call.callee}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
