"""
Which modules the fork server of a launch imports ahead (`preload="auto"`), by the text of the entry point.

Rules of this file: only what the lists of `_allowed` name; in doubt torch alone; where the text sets a variable that is
lost once torch is imported, nothing, so that each worker imports torch by itself, after that; nothing either where the
project has a module with the name of one that would be imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from attrs import frozen

from elasticlib.preload._allowed import BROUGHT, COMPILER, KERNELS, NUMPY, OPTIMIZER, TORCH
from elasticlib.preload._script_text import Text, is_of_python, read
from elasticlib.processes import absolute_path, folder_of_script
from elasticlib.workers.child import StartSpec, folders_before, hidden_by

_OPTIMIZERS = frozenset("optim optimizer lr_scheduler FullyShardedDataParallel FSDP fully_shard Trainer".split())
"""
Words of a program that makes an optimizer, or shards one.

Not those of DDP: a model that is freed after its gloo group was destroyed waits for itself more often where torch's
compiler is imported, which DDP alone does not do.
"""
_TRAINERS = frozenset(
    "lightning pytorch_lightning transformers accelerate trl peft deepspeed diffusers fastai ignite composer".split()
)
"""Packages of others that do so for the program."""
_COMPILERS = frozenset({"compile", "_inductor"})


@frozen
class Choice:
    """What to import ahead, and what the text said besides."""

    modules: tuple[str, ...] = (TORCH,)
    threads: int | None = None
    """What the program computes with, where it says so first of all."""


def choose_preload(common: StartSpec, function: Callable[..., Any] | None, text: bytes | None = None) -> Choice:
    """What to import ahead for workers that are started with *common*, or call *function*, or run the script *text*."""
    chosen = _of_entry_point(common, function, text)
    tops = {name.partition(".")[0] for name in chosen.modules}
    if tops and hidden_by(_folders(common), tops | BROUGHT):
        return Choice((), None)  # the program finds its own, and torch does too if it needs one of the name
    return chosen


def _folders(common: StartSpec) -> list[str]:
    """Return the project's folders, which come first on the search path of workers that are started with *common*."""
    if common.kind == "function":
        return folders_before(common.sys_path, {os.path.dirname(os.__file__)})
    return [os.path.join(common.cwd, common.path0)]


def _of_entry_point(common: StartSpec, function: Callable[..., Any] | None, text: bytes | None) -> Choice:
    if function is not None:
        return of_function(function)
    if text is not None:
        return _chosen(read(common.argv[0], os.path.join(common.cwd, common.path0), source=text))
    if common.kind == "script":
        return of_script(os.path.join(common.cwd, common.argv[0]))
    if common.kind == "package" and os.path.isdir(common.path0):
        return of_script(os.path.join(common.path0, "__main__.py"))
    if common.kind == "module":
        base = os.path.join(common.path0, *common.entry.split("."))
        own = next(filter(os.path.isfile, (f"{base}.py", os.path.join(base, "__main__.py"))), None)
        if own is not None:
            return _chosen(read(own, common.path0))
        return _chosen(Text({common.entry.partition(".")[0]}, is_whole=False))
    return Choice()


def preload_for(entrypoint: object) -> tuple[str, ...]:
    """What the automatic preload imports for *entrypoint*, as far as that alone tells, before there is a launch."""
    if callable(entrypoint):
        return of_function(entrypoint).modules
    if isinstance(entrypoint, (str, os.PathLike)) and os.path.isfile(entrypoint):
        return of_script(absolute_path(os.fspath(entrypoint))).modules
    return (TORCH,)


def of_script(path: str) -> Choice:
    """What to import ahead for the script at *path*."""
    return _chosen(read(path, folder_of_script(path)))


def of_function(function: Callable[..., Any]) -> Choice:
    """What to import ahead for *function*."""
    if _is_ours(function):  # a pool's: which functions its workers are to call, no text says
        return Choice()
    code, text = getattr(function, "__code__", None), Text()
    if code is not None:
        name = function.__qualname__.partition(".")[0]
        text = read(code.co_filename, os.path.dirname(code.co_filename), name)
    if TORCH in sys.modules:  # the program has it for its functions
        text.imports.add(TORCH)
    text.is_whole = False  # what the function's arguments and modules bring is in no text
    return _chosen(text)


def _is_ours(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _chosen(text: Text) -> Choice:
    others = {name for name in text.imports if not is_of_python(name)}
    if text.sets or not (others or not text.is_whole):
        return Choice((), None)
    if text.is_whole and others == {NUMPY}:
        return Choice((NUMPY,), text.threads)
    found = [TORCH]
    if text.words & _OPTIMIZERS or others & _TRAINERS:
        found.append(OPTIMIZER)
    if TORCH in others and text.words & _COMPILERS:
        found += [OPTIMIZER, COMPILER]
    if KERNELS in others:
        found.append(KERNELS)
    return Choice(tuple(dict.fromkeys(found)), text.threads)
