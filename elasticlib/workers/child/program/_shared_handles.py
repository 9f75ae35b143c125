"""
Objects that programs share by ``multiprocessing``, in a worker: descriptors, the caller's key and
its resource tracker.

With these, queues, locks, proxies of managers and shared memory work as in a process that
multiprocessing has spawned. (Python: ``multiprocessing.spawn``, ``multiprocessing.reduction``)
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
    """
    A descriptor of the caller's among the memories of a call; multiprocessing's objects ask it
    for a copy.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        """Return a copy, which the asking object owns."""
        return os.dup(_buffers.shared[self.index])


class Family(NamedTuple):
    """State that a process of multiprocessing inherits from the one that started it."""

    authkey: bytes
    """Key with which managers and listeners recognize each other."""
    tracker: SharedDescriptor | None
    """
    Descriptor of the resource tracker; None if none runs.

    That process removes named memory and semaphores once the program has ended.
    """


def join(family: Family) -> None:
    """Join the *family* of the caller."""
    multiprocessing.process.current_process().authkey = family.authkey
    if family.tracker is None:
        return
    from multiprocessing.resource_tracker import _resource_tracker

    tracker: Any = _resource_tracker
    # A worker that has started a tracker of its own keeps it.
    if tracker._fd is None:
        tracker._fd = family.tracker.detach()


def arena(size: int, descriptor: SharedDescriptor) -> Any:
    """
    Return the caller's memory of *size* bytes for values and arrays.

    Its descriptor stays open while the memory is in use.
    """
    from multiprocessing.heap import Arena

    number = descriptor.detach()
    made = Arena(size, number)
    weakref.finalize(made, os.close, number)
    return made


def of_torch(name: str) -> Any:
    """
    Return the operator, or the namespace of operators or classes, that torch has under *name*.
    """
    torch = sys.modules.get("torch") or __import__("torch")
    return operator.attrgetter(name)(torch)
