"""
What programs share by ``multiprocessing``, as a worker gets it: descriptors, the caller's key and its resource tracker.

So queues, locks, proxies of managers and shared memory work in a worker as in a process that multiprocessing has
spawned. (Python: ``multiprocessing.spawn``, ``multiprocessing.reduction``)
"""

from __future__ import annotations

import multiprocessing.process
import operator
import os
import sys
import weakref
from typing import Any, NamedTuple

from elasticlib.workers.child import _buffers


class SharedDescriptor:
    """A descriptor of the caller's among the memories of a call; multiprocessing's objects ask it for a copy."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        """A copy, which belongs to whoever asks."""
        return os.dup(_buffers.shared[self.index])


class Family(NamedTuple):
    """What a process of multiprocessing has from the one that started it."""

    authkey: bytes
    """By which managers and listeners know each other."""
    tracker: SharedDescriptor | None
    """Of the process that removes named memory and semaphores once the program has ended; None where none runs."""


def join(family: Family) -> None:
    """Be of the *family* of the caller."""
    multiprocessing.process.current_process().authkey = family.authkey
    if family.tracker is None:
        return
    from multiprocessing.resource_tracker import _resource_tracker

    tracker: Any = _resource_tracker
    # A worker that has started a tracker of its own keeps it.
    if tracker._fd is None:
        tracker._fd = family.tracker.detach()


def arena(size: int, descriptor: SharedDescriptor) -> Any:
    """The caller's memory of *size* bytes for values and arrays; its descriptor is open for as long as it is used."""
    from multiprocessing.heap import Arena

    number = descriptor.detach()
    made = Arena(size, number)
    weakref.finalize(made, os.close, number)
    return made


def of_torch(name: str) -> Any:
    """The operator, or the namespace of operators or classes, that torch has under *name*."""
    torch = sys.modules.get("torch") or __import__("torch")
    return operator.attrgetter(name)(torch)
