"""
Display of objects by a function that runs for a notebook, without a keyboard and without widgets.

Figures, tables and other objects are shown as the notebook would show them. Code that would ask
the user raises an error with the alternative: the cell's input belongs to the kernel, and a
debugger's prompt would reach the end of its input and end the program. A bar of ``tqdm.notebook``
becomes a text bar.

Rules of this file:

* A worker that displays nothing imports nothing for it.
* The shell that IPython finds here formats objects and sends them; it runs no cell.
* An object that cannot be sent is shown as its text.
* A hook that the program sets later, as debugpy does, or that the variable PYTHONBREAKPOINT
  names, stays.
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
from dataclasses import dataclass
from json import dumps
from typing import Any, NoReturn

from elasticlib.notebook import Mark, written
from elasticlib.stacks import CALLERS, threads_of
from elasticlib.workers.child._serving import when_imported

DISPLAYED_SUFFIX = ".displayed"
"""Suffix of the file with the displayed objects, beside that of the output."""
SHELL = "IPython.core.interactiveshell"
"""
The module with IPython's shell.

Any import may look for the shell, and act differently without one. So each worker itself imports
this module, and all modules that import it.
"""
TEXT_BARS = "tqdm.notebook"
_OF_WIDGETS = ("status_printer", "display", "colour", "__iter__", "update", "close", "clear", "reset")
"""Names that tqdm's class of widget bars overrides from text bars, apart from its constructor."""
_BREAKPOINT_VARIABLE = "PYTHONBREAKPOINT"
_shell: Any = None


@dataclass(frozen=True)
class _Refusal:
    """Parts of the message of code that would ask."""

    who: str
    instead_of_stop: str
    instead_of_question: str


IN_NOTEBOOK = _Refusal(
    "a rank that a notebook launched",
    "Call the function in the cell itself, without the launch, or let the rank raise an exception and run "
    "%debug in the next cell",
    "Ask in the cell, and pass the answer to the function as an argument",
)
ON_OTHER_MACHINE = _Refusal(
    "a rank on another machine",
    "Call the function in your program itself, without the launch, or print what you want to see",
    "Ask in your program, and pass the answer to the function as an argument",
)
_refusal = IN_NOTEBOOK


def attach(mark: str | None, ranks: Sequence[int] | None, rank: int, output: str | None) -> None:
    """
    Show displayed objects, and refuse code that would ask the user; called before any of the
    user's code.

    * *mark* marks the objects in the *output*, a file. Empty: the caller shows text only. None:
      the caller is not a notebook.
    * Ranks other than *ranks* (None: all) show text.
    """
    if mark is None:
        return
    if output is not None and (ranks is None or rank in ranks):
        _Publisher.mark, _Publisher.output = mark, output
    builtins.__dict__.setdefault("display", _display)
    when_imported(SHELL, _become_shell)
    when_imported(TEXT_BARS, use_text_bars)
    refuse_to_ask()


def call_function(call: Callable[[], Any]) -> Any:
    """
    Call the user's function, and show the figures that it leaves open, as a cell does at its end.
    """
    try:
        return call() if _has_frame(call) else _call_native(call)
    finally:
        if _shell is not None:
            _shell.events.trigger("post_execute")


def _has_frame(call: Callable[[], Any]) -> bool:
    """
    Return True if *call* has a frame of its own on the stack while it works; compiled code, as by
    Cython, has none.
    """
    while isinstance(call, functools.partial):
        call = call.func
    return isinstance(getattr(call, "__func__", call), types.FunctionType)


def _call_native(call: Callable[[], Any]) -> Any:
    # This frame stands on the stack for compiled code, which has none.
    return call()


def has_returned(stacks: str) -> bool:
    """
    Return True if the fault handler's *stacks* show that the user's function is over, but its
    call is not.

    No frame is above elasticlib's then: the function's local variables are being destroyed.
    """
    innermost = [thread.frames[0] for thread in threads_of(stacks) if thread.frames]
    return any(frame.file == __file__ and frame.function == call_function.__name__ for frame in innermost)


def _display(*objects: Any, **more: Any) -> Any:
    """Display *objects* as IPython's ``display`` does, which every cell has."""
    return importlib.import_module("IPython.display").display(*objects, **more)


class _Publisher:
    """Publisher for IPython's display system."""

    mark = ""
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
        # Widgets live in the process that made them: no front end can draw these.
        plain.pop("application/vnd.jupyter.widget-view+json", None)
        message = {"data": plain, "metadata": metadata or {}, "transient": transient or {}, "update": update}
        self._send(message, str(data.get("text/plain", "")), is_new=not update)

    def clear_output(self, wait: bool = False) -> None:
        self._send({"clear": True, "wait": bool(wait)}, "", is_new=False)

    def _send(self, message: Mapping[str, Any], text: str, *, is_new: bool) -> None:
        # The mark is written past these streams, and must follow the text that was printed before.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

        if not self.mark:
            if text:
                _write_all(f"{text}\n".encode(errors="replace"))
            return

        content = dumps(message, default=repr).encode()
        path = self.output + DISPLAYED_SUFFIX
        with open(path, "ab", buffering=0) as file:
            file.write(content)
            offset = file.tell() - len(content)

        place = Mark(path, offset, len(content), text, is_new)
        _write_all(written(self.mark, place).encode(errors="replace"))


def _write_all(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


def _become_shell() -> None:
    """Install a shell that IPython, and libraries for it, use to display objects."""
    global _shell
    module: Any = sys.modules[SHELL]
    if module.InteractiveShell.initialized():
        # The user's program has made its own shell.
        return

    class WorkerShell(module.InteractiveShell):  # type: ignore[misc]
        """The display part of a shell, without the rest."""

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
        # As traitlets does: the classes above find the same instance.
        for parent in WorkerShell._walk_mro():
            parent._instance = _shell
    except Exception as error:
        # Another version of IPython may lack one of these.
        print(f"elasticlib: display() shows text only: {error!r}", file=sys.stderr)


# Without a keyboard.


def refuse_to_ask(refusal: _Refusal = IN_NOTEBOOK) -> None:
    """
    Make all functions that ask the user raise; called in a worker, before any of the user's code.
    """
    global _refusal
    _refusal = refusal
    sys.breakpointhook = _break
    # The prompts of debuggers use it, too.
    builtins.input = _input
    when_imported("getpass", _replace_getpass)


def _replace_getpass() -> None:
    sys.modules["getpass"].__dict__["getpass"] = _getpass


def _break(*args: Any, **kwargs: Any) -> Any:
    if os.environ.get(_BREAKPOINT_VARIABLE):
        return sys.__breakpointhook__(*args, **kwargs)
    _refuse_to_stop("breakpoint()")


def _input(prompt: object = "", /) -> str:
    asker = sys._getframe(1).f_globals.get("__name__")
    if asker == "cmd":
        # The module with the loop of pdb's prompt.
        _refuse_to_stop("a debugger")
    _refuse("input()")


def _getpass(prompt: str = "", stream: object = None, *, echo_char: str | None = None) -> str:
    _refuse("getpass()")


def _refuse_to_stop(name: str) -> NoReturn:
    raise RuntimeError(f"{name} cannot stop here: {_refusal.who} cannot read your input. {_refusal.instead_of_stop}")


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(f"{name} cannot ask here: {_refusal.who} cannot read your input. {_refusal.instead_of_question}")


# Without widgets.


def use_text_bars() -> None:
    """
    Turn the bars of ``tqdm.notebook``, which is imported, into text bars.

    The class itself is changed, because functions that were sent refer to it by its name.
    """
    kind: Any = getattr(sys.modules[TEXT_BARS], "tqdm_notebook", None)
    if kind is None:
        # Another version of tqdm.
        return

    for name in _OF_WIDGETS:
        if name in vars(kind):
            delattr(kind, name)

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("display", None)
        if isinstance(kwargs.get("ncols"), str):
            # Such as "100%", which is a width of widgets.
            del kwargs["ncols"]
        super(kind, self).__init__(*args, **kwargs)

    kind.__init__ = begin


CALLERS.add(__file__)
