"""
What a function that runs for a notebook displays: figures, tables and other objects as the notebook would show them.

Rules of this file: a worker that displays nothing imports nothing for it. IPython finds a shell here that formats and
passes on, and is no more: it runs no cell. What cannot be passed on is shown as its text, as it would be without us.
"""

from __future__ import annotations

import base64
import builtins
import functools
import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any

from elasticlib._marks import Mark, written
from elasticlib.stacks import CALLERS, threads_of
from elasticlib.workers.child._serving import when_imported
from elasticlib.workers.child.cells import _asking, _text_bars

DISPLAYED_SUFFIX = ".displayed"
"""Ends the name of the file, beside that of the output, with what was displayed."""
SHELL = "IPython.core.interactiveshell"
"""
The module with IPython's shell. Whatever is imported may ask it, and do something else where there is none: so each
worker imports it, and what imports it, by itself.
"""
_shell: Any = None


def attach(word: str | None, ranks: Sequence[int] | None, rank: int, output: str | None) -> None:
    """
    In a worker, before any of the user's code: have what is displayed shown, and what would ask the user refused.

    *word* marks it in the *output*, a file; empty: the caller shows text only; None: it is no notebook. Of others than
    *ranks* (None: all) text is shown.
    """
    if word is None:
        return
    if output is not None and (ranks is None or rank in ranks):
        _Publisher.word, _Publisher.output = word, output
    builtins.__dict__.setdefault("display", _display)
    when_imported(SHELL, _become_shell)
    when_imported(_text_bars.MODULE, _text_bars.use_text)
    _asking.refuse_to_ask()


def call_function(call: Callable[[], Any]) -> Any:
    """Call the user's function, and show the figures that it leaves open, as a cell does at its end."""
    try:
        return call() if _has_frame(call) else _call_native(call)
    finally:
        if _shell is not None:
            _shell.events.trigger("post_execute")


def _has_frame(call: Callable[[], Any]) -> bool:
    """Whether *call* has a frame of its own on the stack while it works: not so what is compiled, say by Cython."""
    while isinstance(call, functools.partial):
        call = call.func
    return isinstance(getattr(call, "__func__", call), types.FunctionType)


def _call_native(call: Callable[[], Any]) -> Any:
    return call()  # stands on the stack for what has no frame there


def has_returned(stacks: str) -> bool:
    """
    Whether the fault handler's *stacks* show that the user's function is over, but not the call of it.

    No frame is above ours then: the function's local variables are being destroyed.
    """
    innermost = [thread.frames[0] for thread in threads_of(stacks) if thread.frames]
    return any(frame.file == __file__ and frame.function == call_function.__name__ for frame in innermost)


def _display(*objects: Any, **more: Any) -> Any:
    """IPython's, which every cell has."""
    return importlib.import_module("IPython.display").display(*objects, **more)


class _Publisher:
    """Takes what IPython's display system publishes, as its own publishers do."""

    word = ""
    output = ""

    def publish(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        plain = {kind: base64.b64encode(x).decode() if isinstance(x, bytes) else x for kind, x in data.items()}
        # Widgets live in the process that made them: there is nobody to draw these.
        plain.pop("application/vnd.jupyter.widget-view+json", None)
        message = {"data": plain, "metadata": metadata or {}, "transient": transient or {}, "update": update}
        self._send(message, str(data.get("text/plain", "")), is_new=not update)

    def clear_output(self, wait: bool = False) -> None:
        self._send({"clear": True, "wait": bool(wait)}, "", is_new=False)

    def _send(self, message: Mapping[str, Any], text: str, *, is_new: bool) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if not self.word:
            if text:
                _write_all(f"{text}\n".encode(errors="replace"))
            return
        content = dumps(message, default=repr).encode()
        path = self.output + DISPLAYED_SUFFIX
        with open(path, "ab", buffering=0) as file:
            file.write(content)
            offset = file.tell() - len(content)
        mark = Mark(path, offset, len(content), text, is_new)
        _write_all(written(self.word, mark).encode(errors="replace"))


def _write_all(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


def _become_shell() -> None:
    """Be what IPython, and what is made for it, asks for the way to display."""
    global _shell
    module: Any = sys.modules[SHELL]
    if module.InteractiveShell.initialized():
        return  # the user's program has made its own

    class WorkerShell(module.InteractiveShell):  # type: ignore[misc]
        """The way to display, and nothing else of a shell."""

        def __init__(self) -> None:
            super(module.InteractiveShell, self).__init__()
            self.configurables = [self]
            self.init_display_formatter()
            self.display_pub = _Publisher()
            events: Any = importlib.import_module("IPython.core.events")
            self.events = events.EventManager(self, events.available_events)

        def enable_gui(self, gui: object = None) -> None:
            pass

        def showtraceback(self, *_: Any, **__: Any) -> None:
            traceback.print_exc()

    try:
        WorkerShell._instance = _shell = WorkerShell()
        for parent in WorkerShell._walk_mro():
            parent._instance = _shell
    except Exception as error:  # another version of IPython
        print(f"elasticlib: display() shows text only: {error!r}", file=sys.stderr)


CALLERS.add(__file__)
