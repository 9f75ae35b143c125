"""
The fork server's loop: it forks a child for each request.

Rules of this file: each request gets an answer; a child that ends is never a reason to end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
from collections.abc import Callable, Mapping
from typing import NoReturn

from elasticlib import processes
from elasticlib.processes import (
    Channel,
    Message,
    descendants,
    kill_descendants,
    living_parent,
    outlive_parent,
    start_error,
)
from elasticlib.workers.spawner import _begin, _kernel_facts


class RequestLoop:
    """Forks what is asked for over *control*, until that or *parent* is gone."""

    def __init__(
        self,
        control: Channel,
        parent: int,
        keep: frozenset[int],
        changed: dict[str, str | None],
        outliving: processes.SharedSessions,
    ) -> None:
        self._control = control
        self._parent = parent
        self._keep = keep
        self._changed = changed
        self._selector = selectors.DefaultSelector()
        self._outliving = outliving
        """What workers of successful programs have detached: it outlives the spawner, and the launcher's good end."""
        self._watched: set[int] = set()
        """The children that are reaped at their end: what was forked here, and what was detached."""

    def serve(self, ready: Message) -> NoReturn:
        """Say *ready* and go on until the end."""
        self._selector.register(self._control, selectors.EVENT_READ, self._obey)
        self._selector.register(living_parent(self._parent), selectors.EVENT_READ, self._end)
        outlive_parent()
        # A descriptor of each launch's spawner; workers get the caller's limit.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        me = os.getpid()
        with processes.own_descriptors() as itself:
            self._control.send({**ready, "pid": me}, itself)
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _leave(self) -> NoReturn:
        """The launcher is gone: kill all."""
        kill_descendants()
        os._exit(0)

    def _end(self) -> NoReturn:
        """The launcher ends in order, or the reaper was lost: kill all but what outlives its launch."""
        kill_descendants(kept=self._outliving)
        os._exit(0)

    def _obey(self) -> None:
        received = self._control.receive(whole=False)
        if received is None:
            self._leave()
        message, descriptors = received
        if message["op"] == "end":
            self._end()
        elif message["op"] == "ping":
            self._control.send({"op": "pong", "number": message["number"]})
        elif message["op"] == "signal":
            if message["pid"] in self._watched:  # else it has ended, and the number may be a stranger's
                os.kill(message["pid"], message["signal"])
        elif descriptors:  # else none was free, so the asker's end is closed, and it knows
            self._fork_for(message, descriptors)

    def _fork_for(self, message: Message, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # of no concern to the launches that run
            _turn_down(descriptors, str(start_error("the spawner process", error)))
            return
        if pid == 0:
            self._let_go_of_all()
            (descriptor,) = descriptors
            if message["op"] in _QUESTIONS:
                _answer(message["op"], Channel.adopt(descriptor), self._changed)
            _begin.be_spawner(
                descriptor, os.getppid(), self._outliving, self._keep, self._changed, guardian=self._parent
            )
        self._watch(pid, self._end_leftovers)
        (descriptor,) = descriptors
        if message["op"] in _QUESTIONS:
            os.close(descriptor)
        else:
            _begin.tell_forked(descriptor, pid)

    def _let_go_of_all(self) -> None:
        """In a child: what is this loop's alone."""
        own = [key.fd for key in self._selector.get_map().values()]
        self._selector.close()
        for descriptor in own:
            os.close(descriptor)

    def _watch(self, pid: int, at_end: Callable[[], None]) -> None:
        """Reap the child *pid* at its end, then call *at_end*."""
        handle = processes.handle_of(pid)
        self._watched.add(pid)
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._ended(pid, handle, at_end))

    def _ended(self, pid: int, handle: processes.Handle, at_end: Callable[[], None]) -> None:
        self._selector.unregister(handle)
        handle.close()
        os.waitpid(pid, 0)
        self._watched.remove(pid)
        self._watch_detached()
        at_end()

    def _watch_detached(self) -> None:
        """
        Watch what a child that ended has left here of what outlives its launch, such as the commands of a shell.

        It is reaped at its end, since the program may look whether it is there.
        """
        for pid in _kernel_facts.children(os.getpid()):
            if pid in self._outliving and pid not in self._watched:
                with contextlib.suppress(OSError):  # no descriptor is free: it stays a zombie until this process ends
                    self._watch(pid, self._drop_ended_sessions)

    def _end_leftovers(self) -> None:
        kill_descendants(self._watched, kept=self._outliving)

    def _drop_ended_sessions(self) -> None:
        self._outliving.drop_ended(pid for pid, _, _ in descendants(os.getpid()))


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
    try:
        # The launcher gets a handle to end this process by, should a driver hang.
        with processes.own_descriptors() as itself:
            was_sent = asker.send({"op": "asking"}, itself)
        received = asker.receive() if was_sent else None
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
    from elasticlib.numa import gpu_addresses_here

    return {"addresses": gpu_addresses_here()}


_QUESTIONS = {"count": ("count the accelerators", _count_devices), "gpus": ("list the GPUs", _list_gpus)}
