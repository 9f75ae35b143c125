"""
The fork server: a process that did the imports once, from which every launch's spawner is forked.

It is a program of its own, in a session of its own, so it never holds the caller's threads, CUDA context
or ``__main__``. It imports what ``preload`` names, refuses what would not survive a fork, freezes its
garbage so that children share the pages, and then only forks. It ends with the launcher.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import NoReturn

from elasticlib._wire import Channel
from elasticlib.workers import _reaper
from elasticlib.workers.child import _child, _ending, _randomness
from elasticlib.workers.spawner import _leftovers
from elasticlib.workers.spawner._observer import Absences, Observer, names_in
from elasticlib.workers.spawner._request_loop import RequestLoop

_SHELLS_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})


def _preload(modules: list[str], observer: Observer, control: Channel) -> None:
    for module in modules:
        try:
            why = _leftovers.why_refused(module, observer)
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = f"its import fails with {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        if why is not None:
            control.send({"op": "refused", "module": module, "why": why})
            os._exit(1)


def main() -> NoReturn:
    """Be the fork server; ``sys.argv[1]`` is JSON: what to ``preload`` on which ``path``."""
    parent = os.getppid()
    _reaper.settle_signals()
    asked = json.loads(sys.argv.pop())
    mine = {0, 1, 2, _reaper.FORK_SERVER_FD}
    control = Channel.adopt(_reaper.FORK_SERVER_FD)
    os.set_inheritable(_reaper.FORK_SERVER_FD, False)
    _child.base_path[:] = sys.path
    sys.path[:] = [*asked["path"], *(folder for folder in sys.path if folder not in asked["path"])]
    observer = Observer()
    absences = Absences()
    gc.disable()  # imports make little garbage, and to look for it takes a quarter of their time
    with _randomness.observed(), absences.observing():
        _preload(asked["preload"], observer, control)
    sys.path[:] = _child.base_path
    keep = frozenset(number for _, number in _leftovers.open_files() if number not in mine)
    _child.disown_finalizers()
    _ending.inherit()
    gc.freeze()
    gc.enable()
    _reaper.adopt_orphans()
    given = _first_environment(parent)
    wrapped = _differences(given, _first_environment("self"))
    wrapped.pop("LC_CTYPE", None)  # Python's own doing, where the locale is C
    at_start = _site_reads()
    ready = {
        "op": "ready",
        "names": sorted(observer.names | (at_start or set())),
        "defaults": observer.defaults,
        "found": sorted({name.partition(".")[0] for name in sys.modules}),
        "missing": sorted(absences.names),
        "intel_openmp": _is_mapped("libiomp", "libomp"),
        "whole": wrapped != {} or at_start is None,
    }
    changed = _differences(given, dict(os.environ)) if given else {}
    # Also what the launch that this process was started for had set by itself: another may lack it, or differ.
    changed |= {name: os.environ.get(name) for name in (*observer.written, *observer.defaults)}
    RequestLoop(control, parent, keep, changed).serve(ready)


def _first_environment(process: int | str) -> dict[str, str]:
    """The variables that a process was started with; empty where nobody may look."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            entries = [entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry]
    except OSError:
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, value in entries}


def _differences(given: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str | None]:
    """What the interpreter, its wrapper or the imports changed: new values, None for what was removed."""
    names = [name for name in {**given, **found} if given.get(name) != found.get(name) and name not in _SHELLS_OWN]
    return {name: found.get(name) for name in names}


def _site_reads() -> set[str] | None:
    """What Python's own start, which nobody could observe, looks up; None where that cannot be told."""
    found = {"HOME"} if getattr(sys.modules.get("site"), "ENABLE_USER_SITE", None) else set()
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is None:
            continue
        try:
            with open(path, encoding="utf-8") as file:
                names = names_in(file.read())
        except (OSError, UnicodeError):
            return None
        if names is None:
            return None
        found |= names
    return found


def _is_mapped(*libraries: str) -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        return any(os.path.basename(line.rstrip()).startswith(libraries) for line in file)
