"""
The fork server: a process that did the imports once, from which every launch's spawner is forked.

It is a program of its own, in a session of its own, so it never holds the caller's threads, CUDA context
or ``__main__``. It imports what ``preload`` names, refuses what would not survive a fork, freezes its
garbage so that children share the pages, and then only forks. It ends with the launcher.

Rules of this file: no function of Python is replaced and no hook added, so nothing of ours lives on in what was
imported; of what an allowed import (`_allowed`) sets, workers see only the modules; what a module that was asked for by
name leaves behind is the worker's, to its end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from json import dumps, loads
from typing import Any, NoReturn

from elasticlib import processes
from elasticlib.preload import BY_VALUE, TORCH, is_allowed
from elasticlib.processes import (
    FORK_SERVER_FD,
    KEPT_FD,
    Channel,
    adopt_orphans,
    out_of_removed_folder,
    settle_signals,
    shared_imports,
    time_of_change,
)
from elasticlib.workers.child import _child, _ending, _own_modules, _randomness
from elasticlib.workers.spawner import _fork_worker as fork_worker, _leftovers
from elasticlib.workers.spawner._request_loop import RequestLoop

STACK_AFTER = 9.5
"""Seconds after which an import writes down where it is, for the launcher to tell."""
_SHELLS_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
_LOOKUP = re.compile(
    r"""(?:\bos\.environb?(?:\.(?:get|pop|setdefault)\s*\(|\s*\[)|\bos\.getenvb?\s*\()\s*b?(["'])(?P<name>\w+)\1"""
    r"""|(["'])(?P<sought>\w+)\3\s+(?:not\s+)?in\s+os\.environb?\b(?!\.)"""
)
_ANY_USE = re.compile(r"environ|getenv|exec|eval|__import__|importlib|runpy")


def main(at_start: Collection[str]) -> NoReturn:
    """
    Be the fork server; ``sys.argv[1]`` is JSON: what to ``preload`` on which ``path``.

    *at_start* are the modules that the interpreter had imported by itself.
    """
    _own_modules.note_start(at_start)
    parent = os.getppid()
    settings = loads(sys.argv.pop())
    if "base" in settings:
        sys.path[:] = settings["base"]
        fork_worker.start_all_fresh()
    elif _leftovers.hooks_run():
        _start_without_hooks(settings, parent)
    settle_signals()
    mine = {0, 1, 2, FORK_SERVER_FD, KEPT_FD}
    control = Channel.adopt(FORK_SERVER_FD)
    os.set_inheritable(FORK_SERVER_FD, False)
    os.set_inheritable(KEPT_FD, False)
    _child.base_path[:] = sys.path
    given, before = _first_environment(parent), dict(os.environ)
    folders = _times_of_change(_installed_folders())  # before the imports: what is installed meanwhile is news
    with shared_imports():
        sys.path[:] = [*settings["path"], *(folder for folder in sys.path if folder not in settings["path"])]
        with out_of_removed_folder():
            named = _preload(settings["preload"], settings["path"], control)
        sys.path[:] = _child.base_path
        keep = frozenset(number for _, number in _leftovers.open_files() if number not in mine)
        _ending.inherit(named)
    adopt_orphans()
    wrapped = _differences(given, _first_environment("self"))
    wrapped.pop("LC_CTYPE", None)  # Python's own doing, where the locale is C
    read_at_start = _site_reads()
    ready = {
        "op": "ready",
        "names": sorted(read_at_start or ()),
        "named": bool(named),
        "files": {**folders, **_times_of_change(_files_of(named))},
        "intel_openmp": _is_mapped("libiomp", "libomp"),
        "whole": wrapped != {} or read_at_start is None,
        "left_out": settings.get("left_out", []),
    }
    changed = _differences(given or before, dict(os.environ))
    for name in _leftovers.RANK_VARIABLES:
        changed.pop(name, None)
    RequestLoop(control, parent, keep, changed, processes.SharedSessions(KEPT_FD)).serve(ready)


def _start_without_hooks(settings: Mapping[str, Any], parent: int) -> NoReturn:
    """
    Become a fork server whose interpreter runs no start hooks and imports nothing ahead, on the same search path.

    A hook (``sitecustomize``, a ``.pth`` file) has started a thread or opened a socket here, which a fork would lack or
    share. Workers are new interpreters then, in which it does so again.
    """
    settings = {**settings, "preload": [], "left_out": settings["preload"], "base": sys.path}
    command = [sys.executable, "-S", *sys.orig_argv[1:-1], dumps(settings)]
    os.execve(sys.executable, command, _first_environment(parent) or dict(os.environ))


# The imports.


def _preload(modules: Sequence[str], extra_path: Sequence[str], control: Channel) -> list[str]:
    """Import *modules*, the allowed ones first; the names of all modules that came with the others."""
    for name in _leftovers.RANK_VARIABLES:  # of a launcher that is a worker itself
        os.environ.pop(name, None)
    folders = [each for each in extra_path if each not in _child.base_path]

    @functools.cache
    def is_hidden(top: str) -> bool:
        return bool(_own_modules.hidden_by(folders, {top}))

    def is_for_everybody(name: str) -> bool:
        return is_allowed(name) and not is_hidden(name.partition(".")[0])

    first = [name for name in modules if is_for_everybody(name)]
    with _randomness.noted():
        environment = dict(os.environ)
        for module in first:
            _import(module, control)
            if module == TORCH:
                _randomness.note_torch()
                with contextlib.suppress(ImportError):
                    importlib.import_module(BY_VALUE)  # a project's own one takes its place (`_own_modules`)
        _take_back(environment)
        _child.disown_finalizers()
        before = set(sys.modules)
        for module in modules:
            if module not in first:
                _import(module, control)
    return [name for name in sys.modules if name not in before and not is_for_everybody(name)]


def _take_back(environment: Mapping[str, str]) -> None:
    """Undo what torch's parts set for themselves, and set again when they need it."""
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    temporary: Any = sys.modules.get("tempfile")
    if temporary is not None:
        temporary.tempdir = None  # each worker looks for a folder by itself


def _import(module: str, control: Channel) -> None:
    stack = processes.anonymous_file("stack of an import")
    control.send({"op": "importing", "module": module}, (stack,))
    faulthandler.dump_traceback_later(STACK_AFTER, file=stack)
    try:
        why = _leftovers.why_refused(module)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"its import fails with {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(stack)
    if why is not None:
        control.send({"op": "refused", "module": module, "why": why})
        os._exit(1)


# What a later launch must have in common with this process.


def _installed_folders() -> list[str]:
    """Return the folders of installed packages, whose times of change tell when one was installed anew."""
    return [folder for folder in sys.path if os.path.basename(folder) in ("site-packages", "dist-packages")]


def _files_of(modules: Sequence[str]) -> list[str]:
    found = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return sorted(each for each in found if isinstance(each, str))


def _times_of_change(paths: Sequence[str]) -> dict[str, int]:
    return {path: time_of_change(path) for path in paths}


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
    """What Python's own start looks up, before any of our code runs; None where that cannot be told."""
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


def names_in(source: str) -> set[str] | None:
    """The variables that Python code looks up, by its text; None where it may look up more than is plain."""
    lookups: list[Any] = list(_LOOKUP.finditer(source))
    rest = _LOOKUP.sub("", source)
    return None if _ANY_USE.search(rest) else {each["name"] or each["sought"] for each in lookups}


def _is_mapped(*libraries: str) -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        return any(os.path.basename(line.rstrip()).startswith(libraries) for line in file)
