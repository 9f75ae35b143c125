"""
The choice of modules that the fork server of a launch imports ahead (`preload="auto"`), by the
text of the entry point.

Rules of this file:

* Only modules in the lists of `_allowed`; in doubt, torch alone.
* Nothing if the text sets a variable that torch reads at its import: each worker then imports
  torch after it is set.
* Nothing if the project has a module with the name of one that would be imported.
"""

from __future__ import annotations

import itertools
import os
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

from attrs import frozen

from elasticlib.preload._allowed import COMPILER, DEPENDENCIES, KERNELS, NUMPY, OPTIMIZER, TORCH
from elasticlib.preload._script_text import Text, is_of_python, read
from elasticlib.processes import absolute_path, folder_of_script
from elasticlib.workers.child import StartSpec, folders_before, hidden_by

_OPTIMIZERS = frozenset("optim optimizer lr_scheduler FullyShardedDataParallel FSDP fully_shard Trainer".split())
"""
Words of a program that makes an optimizer, or shards one.

Those of DDP are left out. A model that is freed after its gloo group was destroyed hangs more
often if torch's compiler is imported. DDP alone does not import it.
"""
_TRAINERS = frozenset(
    "lightning pytorch_lightning transformers accelerate trl peft deepspeed diffusers fastai ignite composer".split()
)
"""Third-party packages that make optimizers for the program."""
_COMPILERS = frozenset({"compile", "_inductor"})
_OWN_PACKAGE = __name__.partition(".")[0]


@frozen
class Choice:
    """Modules to import ahead, and the number of threads that the text sets."""

    modules: tuple[str, ...] = (TORCH,)
    threads: int | None = None
    """Number of threads that the program computes with, if it sets that before anything else."""


def choose_preload(common: StartSpec, function: Callable[..., Any] | None, text: bytes | None = None) -> Choice:
    """
    Return the modules to import ahead for workers that are started with *common*.

    They call *function*, or run the script *text*.
    """
    chosen = _of_entry_point(common, function, text)
    if not chosen.modules:
        return chosen
    tops = {name.partition(".")[0] for name in chosen.modules}
    if hidden_by(_folders(common), tops | DEPENDENCIES):
        # The program finds its own module, and torch does too if it needs one of that name.
        return Choice((), None)
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
        folder = os.path.join(common.cwd, common.path0)
        return _chosen(read(common.argv[0], folder, source=text))
    return _of_program(common)


def _of_program(common: StartSpec) -> Choice:
    match common.kind:
        case "script":
            return of_script(os.path.join(common.cwd, common.argv[0]))
        case "package" if os.path.isdir(common.path0):  # and no archive
            return of_script(os.path.join(common.path0, "__main__.py"))
        case "module":
            return _of_module(common)
    return Choice()


def _of_module(common: StartSpec) -> Choice:
    """Return the choice for ``python -m``: by the text of a module of the project, else by its name."""
    base = os.path.join(common.path0, *common.entry.split("."))
    for path in (f"{base}.py", os.path.join(base, "__main__.py")):
        if os.path.isfile(path):
            return _chosen(read(path, common.path0))
    package = common.entry.partition(".")[0]
    return _chosen(Text({package}, is_whole=False))


def preload_for(entrypoint: object) -> tuple[str, ...]:
    """
    Return the modules that the automatic preload imports for *entrypoint*.

    Before a launch only the entry point is known, so the launch may choose others.
    """
    if callable(entrypoint):
        return of_function(entrypoint).modules
    if isinstance(entrypoint, (str, os.PathLike)):
        path = os.fspath(entrypoint)
        if os.path.isfile(path):
            return of_script(absolute_path(path)).modules
    return (TORCH,)


def needs_nothing_ahead(function: object) -> bool:
    """
    Return True if *function* is a plain one of a file whose text imports Python's own modules only.

    Without torch in this program, neither the function's module nor its arguments have imported it.
    """
    if TORCH in sys.modules or not _is_plain(function):
        return False

    text = _text_of(function)
    third_party = set(itertools.filterfalse(is_of_python, text.imports)) - {_OWN_PACKAGE}
    return text.is_whole and not third_party


def _is_plain(function: object) -> bool:
    """Return True for a function of a file that calls no other one which the file does not show."""
    if not isinstance(function, types.FunctionType):
        return False
    # A decorator's function calls the one that it wraps, or has captured.
    is_wrapper = hasattr(function, "__wrapped__") or function.__closure__ is not None
    return not is_wrapper and os.path.isfile(function.__code__.co_filename)


def of_script(path: str) -> Choice:
    """Return the modules to import ahead for the script at *path*."""
    return _chosen(read(path, folder_of_script(path)))


def of_function(function: Callable[..., Any]) -> Choice:
    """Return the modules to import ahead for *function*."""
    # A pool's own function: no text says which functions its workers will call.
    if _is_ours(function):
        return Choice()

    text = _text_of(function)
    # The program has imported torch, most likely for its functions.
    if TORCH in sys.modules:
        text.imports.add(TORCH)
    # No text says what the function's arguments and modules import.
    text.is_whole = False
    return _chosen(text)


def _text_of(function: Any) -> Text:
    """Return the facts in the file of *function*; none of a callable without code of Python."""
    code = getattr(function, "__code__", None)
    if code is None:
        return Text()

    # A method or an inner function is part of the outermost definition.
    name = function.__qualname__.partition(".")[0]
    return read(code.co_filename, os.path.dirname(code.co_filename), name)


def _is_ours(function: Callable[..., Any]) -> bool:
    module = str(getattr(function, "__module__", ""))
    return module.partition(".")[0] == _OWN_PACKAGE


def _chosen(text: Text) -> Choice:
    others = set(itertools.filterfalse(is_of_python, text.imports))
    if text.sets:
        # torch reads these variables at its import, so each worker imports it after they are set.
        return Choice((), None)

    # The program imports Python's own modules only.
    if text.is_whole and not others:
        return Choice((), None)
    if text.is_whole and others == {NUMPY}:
        return Choice((NUMPY,), text.threads)

    modules = (TORCH, *_modules_beside_torch(text, others))
    return Choice(modules, text.threads)


def _modules_beside_torch(text: Text, others: Collection[str]) -> list[str]:
    """Return the modules that torch's own import leaves out, and that the program uses."""
    found = []
    uses_optimizer = not _OPTIMIZERS.isdisjoint(text.words)
    uses_trainer = not _TRAINERS.isdisjoint(others)
    uses_compiler = TORCH in others and not _COMPILERS.isdisjoint(text.words)
    if uses_optimizer or uses_trainer:
        found = [OPTIMIZER]
    if uses_compiler:
        # A compiled model needs torch._dynamo too, which traces it.
        found = [OPTIMIZER, COMPILER]

    if KERNELS in others:
        found.append(KERNELS)
    return found
