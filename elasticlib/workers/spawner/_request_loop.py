"""
The fork server's loop: a child for each request, and a copy of itself that has imported more.

What workers were seen to import is imported by a child, the *copy*, while this process goes on: an import that spoils
it costs nothing but that child, and the next one is made without. Once it is whole it runs this very loop, and gets the
requests of those who want it. It ends with this process; the spawners that it has forked end with it.

Rules of this file: who asks is always answered, by whomever; a copy that ends is never a reason to end.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import selectors
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from elasticlib import processes
from elasticlib._programs import not_started
from elasticlib._wire import Channel, Message, wait_readable
from elasticlib.workers import _reaper
from elasticlib.workers.child import _child, _ending, _held, _randomness, _report
from elasticlib.workers.child._import_notes import ENDED, TOOK_LONG, Import, without
from elasticlib.workers.spawner import _ahead, _begin

_MOST_SPOILT = 16
"""Copies of one order that may be spoilt, each by another module."""
_WAITS = 60.0
"""Seconds that a launch waits for a copy at most."""
_TAKES = 600.0
"""Seconds that a copy may take at most."""


class _Copy:
    """A child that imports what *order* asks for."""

    def __init__(self, order: Message, refused: Mapping[str, list[Any]]) -> None:
        self.order = order
        self.refused = dict(refused)
        """Why modules are refused, and what to import instead, as in a profile."""
        self.ready = False
        self.began = time.monotonic()
        self.trying = ""
        """What it imports now."""
        self.channel, self.theirs = Channel.pair()
        self.handle: processes.Handle | None = None


class RequestLoop:
    """Forks what is asked for over *control*, until that or *parent* is gone."""

    def __init__(
        self, control: Channel, parent: int, keep: frozenset[int], changed: dict[str, str | None], number: int = 0
    ) -> None:
        self._number = number
        """Of the order that made this process a copy; 0 in the fork server itself."""
        self._control = control
        self._parent = parent
        self._keep = keep
        self._changed = changed
        self._selector = selectors.DefaultSelector()
        self._children: dict[processes.Handle, int] = {}
        """The number of each child that was forked here."""
        self._copy: _Copy | None = None
        """The newest one; requests go there once it is ready."""
        self._waiting: deque[tuple[Message, list[int]]] = deque()
        """Requests of those who would rather wait for the copy."""
        self._retires = False

    def serve(self, ready: Message) -> NoReturn:
        """Say *ready* and go on until the end."""
        self._selector.register(self._control, selectors.EVENT_READ, self._obey)
        self._selector.register(_reaper.watch(self._parent), selectors.EVENT_READ, self._leave)
        _reaper.outlive_parent()
        # A descriptor of each launch's spawner; workers get the caller's limit.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        me = os.getpid()
        with processes.own_descriptors() as itself:
            self._control.send({**ready, "pid": me}, itself)
        while not (self._retires and not self._children):
            found = self._selector.select(self._patience())
            if not found and self._copy is not None:
                self._lose_patience(self._copy)
            for key, _ in found:
                if self._selector.get_map().get(key.fd) is key:  # else it was let go of in this very turn
                    key.data()
        self._leave()

    def _patience(self) -> float | None:
        """Seconds until the copy takes too long; None where none is made."""
        if self._copy is None or self._copy.ready:
            return None
        limit = _WAITS if self._waiting else _TAKES
        return max(0.0, self._copy.began + limit - time.monotonic())

    def _lose_patience(self, copy: _Copy) -> None:
        if self._waiting:
            self._serve_waiting(wait=False)
        else:
            self._refuse(copy, TOOK_LONG)

    def _leave(self) -> NoReturn:
        _reaper.sweep()
        os._exit(0)

    def _obey(self) -> None:
        received = self._control.receive(whole=False)
        if received is None:
            self._leave()
        message, descriptors = received
        if message["op"] == "learn":
            if descriptors:  # else none was free, and nothing is learned
                self._make_copy(_Copy({**message, **_contents(descriptors)}, {}))
        elif message["op"] == "retire":
            self._retires = True
            self._selector.unregister(self._control)  # whose end means no more
        elif descriptors:  # else none was free, so the asker's end is closed, and it knows
            self._answer(message, descriptors)

    def _answer(self, message: Message, descriptors: list[int]) -> None:
        wanted = message.get("copy", "none")
        if wanted != "none" and self._copy is not None and self._copy.order["number"] == message["number"]:
            if not self._copy.ready and wanted == "wait" and not self._copy.order["paced"]:
                self._waiting.append((message, descriptors))
                return
            if self._copy.ready and self._copy.channel.send({**message, "copy": "none"}, tuple(descriptors)):
                for descriptor in descriptors:
                    os.close(descriptor)
                return
        self._fork_for(message, descriptors)

    def _fork_for(self, message: Message, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # of no concern to the launches that run
            _turn_down(descriptors, str(not_started("the process that starts the workers", error)))
            return
        if pid == 0:
            self._let_go_of_all()
            (descriptor,) = descriptors
            if message["op"] in _QUESTIONS:
                _answer(message["op"], Channel.adopt(descriptor), self._changed)
            _begin.be_spawner(descriptor, os.getppid(), self._keep, self._changed, copy=self._number)
        for descriptor in descriptors:
            os.close(descriptor)
        self._watch(pid)

    def _let_go_of_all(self) -> None:
        """In a child: what is this loop's alone."""
        own = [key.fd for key in self._selector.get_map().values()]
        own += [number for _, numbers in self._waiting for number in numbers]
        self._selector.close()
        for descriptor in own:
            os.close(descriptor)

    def _watch(self, pid: int) -> processes.Handle:
        handle = processes.handle_of(pid)
        self._children[handle] = pid
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._ended(handle))
        return handle

    def _ended(self, handle: processes.Handle) -> None:
        self._selector.unregister(handle)
        handle.close()
        os.waitpid(self._children.pop(handle), 0)
        copy = self._copy
        if copy is not None and copy.handle is handle:
            copy.handle = None
            self._listen(copy)
            if self._copy is copy:
                self._copy_ended(copy)
        # Whoever is my child and was not forked by me was left behind by the one that ended.
        _reaper.sweep(spare=set(self._children.values()))

    # The copy.

    def _make_copy(self, copy: _Copy) -> None:
        """Replace the copy that there is, which goes on until the spawners that it has forked have ended."""
        former, self._copy = self._copy, None
        if former is not None:
            self._drop(former)
        try:
            pid = os.fork()
        except OSError:
            copy.theirs.close()
            copy.channel.close()
            self._tell(copy)
            self._serve_waiting(wait=False)
            return
        if pid == 0:
            parent = os.getppid()
            self._let_go_of_all()
            copy.channel.close()
            _be_copy(copy, parent, self._keep, self._changed)
        copy.theirs.close()
        copy.handle = self._watch(pid)
        self._selector.register(copy.channel, selectors.EVENT_READ, lambda: self._listen(copy))
        self._copy = copy

    def _listen(self, copy: _Copy) -> None:
        while self._copy is copy and wait_readable([copy.channel], 0):
            received = copy.channel.receive(whole=False)
            if received is None:
                self._copy_ended(copy)
                return
            message, descriptors = received
            for descriptor in descriptors:
                os.close(descriptor)
            if message["op"] == "trying":
                copy.trying = message["module"]
            elif message["op"] == "spoilt":
                self._spoilt(copy, message["module"], [message["why"], message["instead"]])
            else:
                copy.ready = True
                self._tell(copy, message["names"], message["files"])
                self._serve_waiting()

    def _copy_ended(self, copy: _Copy) -> None:
        if copy.ready:
            self._lose(copy)
        else:
            self._refuse(copy, ENDED)

    def _refuse(self, copy: _Copy, why: str) -> None:
        """What the copy is importing is the reason why it does not go on."""
        if copy.trying:
            self._spoilt(copy, copy.trying, [why, []])
        else:
            self._lose(copy)

    def _spoilt(self, copy: _Copy, module: str, why: list[Any]) -> None:
        if module:  # else each import is looked at now, to find out which one it was
            copy.refused = {**copy.refused, module: why}
        # Who waits does so for imports that are known to be well: it could take long to find out which ones are.
        self._tell(copy)
        self._serve_waiting(wait=False)
        if len(copy.refused) > _MOST_SPOILT:
            self._lose(copy)
        else:
            self._make_copy(_Copy({**copy.order, "paced": True}, copy.refused))

    def _lose(self, copy: _Copy) -> None:
        """Go on without any."""
        self._copy = None
        self._drop(copy)
        self._tell(copy)
        self._serve_waiting()

    def _drop(self, copy: _Copy) -> None:
        """Give it no more requests; it ends once its spawners have."""
        copy.channel.send({"op": "retire"})
        self._selector.unregister(copy.channel)
        copy.channel.close()
        if not copy.ready and copy.handle is not None:
            _reaper.send(copy.handle, signal.SIGKILL)
        copy.handle = None

    def _tell(self, copy: _Copy, names: list[str] | None = None, files: Sequence[str] = ()) -> None:
        told = {
            "op": "learned",
            "number": copy.order["number"],
            "names": names,
            "refused": copy.refused,
            "files": list(files),
        }
        self._control.send({**told, "done": copy is not self._copy or copy.ready})

    def _serve_waiting(self, wait: bool = True) -> None:
        waiting, self._waiting = self._waiting, deque()
        for message, descriptors in waiting:
            self._answer(message if wait else {**message, "copy": "ready"}, descriptors)


def _contents(descriptors: list[int]) -> Message:
    (memory,) = descriptors
    try:
        body = json.loads(_report.read_exactly(memory, os.fstat(memory).st_size))
        assert isinstance(body, dict)
        return body
    finally:
        os.close(memory)


def _be_copy(copy: _Copy, parent: int, keep: frozenset[int], changed: dict[str, str | None]) -> NoReturn:
    """Import what is wanted, then serve as the fork server does; or say what spoilt this process, and end."""
    try:
        _reaper.die_with_parent(parent)
        _reaper.adopt_orphans()
        order = copy.order
        _take_environment(order["env"], changed)
        wanted = without([Import.of(each) for each in order["wanted"]], copy.refused)

        def trying(name: str) -> None:
            copy.theirs.send({"op": "trying", "module": name})

        gc.disable()
        with _randomness.observed():
            try:
                names = _ahead.import_ahead(wanted, order["own"], order["paced"], trying)
            except _ahead.SpoiltError as error:
                instead = [each.plain() for each in error.instead]
                copy.theirs.send({"op": "spoilt", "module": error.module, "why": error.why, "instead": instead})
                os._exit(1)
        _child.disown_finalizers()
        _ending.inherit()
        gc.freeze()
        gc.enable()
        RequestLoop(copy.theirs, parent, keep, changed, order["number"]).serve(
            {"op": "ready", "names": names, "files": _held.files()}
        )
    finally:
        os._exit(1)


def _take_environment(given: Mapping[str, str], changed: Mapping[str, str | None]) -> None:
    """Have the variables of a launch, as the fork server's interpreter and imports changed its own."""
    wanted = {**given, **changed}
    os.environ.clear()
    os.environ.update({name: value for name, value in wanted.items() if value is not None})


def _turn_down(descriptors: list[int], why: str) -> None:
    for descriptor in descriptors:
        asker = Channel.adopt(descriptor)
        asker.send({"op": "broken", "why": why})
        asker.close()


def _answer(question: str, asker: Channel, changed: Mapping[str, str | None]) -> NoReturn:
    """Tell what torch finds on this machine, in a child that is thrown away with its device context."""
    what, find = _QUESTIONS[question]
    _held.give_all()
    try:
        # The launcher gets a handle to end this process by, should a driver hang.
        with processes.own_descriptors() as itself:
            told = asker.send({"op": "asking"}, itself)
        received = asker.receive() if told else None
        if received is None:
            os._exit(0)  # nobody waits any more
        # Which devices are visible is up to the launch, and not to the one that this fork server was made for.
        _take_environment(received[0]["env"], changed)
        asker.send(find())
    except BaseException as error:
        asker.send({"why": f"torch cannot {what}: {type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _count_devices() -> Message:
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if kind is not None else 0
    return {"count": count, "kind": kind.type if kind is not None else ""}


def _list_gpus() -> Message:
    from elasticlib.numa import _gpus

    return {"addresses": _gpus.addresses_here()}


_QUESTIONS = {"count": ("count the accelerators", _count_devices), "gpus": ("list the GPUs", _list_gpus)}
