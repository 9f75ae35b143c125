"""
The host of a program's sidecars: it imports their modules once, and each is forked from it.

Rules of this file: one thread, which opens nothing and only talks to the program. So a forked
sidecar is as whole as a program that was started. A sidecar knows nothing of the others, and
outlives this process; it ends with the program.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import NoReturn

from elasticlib import processes
from elasticlib.processes import (
    CHANNEL_FD,
    Channel,
    Message,
    close_all_but,
    start_error,
    wait_readable,
    wake_with_parent,
)
from elasticlib.rendezvous.sidecar import _bridge


def main() -> NoReturn:
    """
    Fork a sidecar for each channel that the parent sends, until the parent is gone or closes the
    connection.
    """
    parent = os.getppid()
    launcher = _bridge.follow(parent)

    # No code here waits for forked processes: the kernel reaps them, and the launcher has handles
    # of its own.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = Channel.adopt(CHANNEL_FD)
    while True:
        if launcher.fileno() in wait_readable([control, launcher], None):
            os._exit(0)
        received = control.receive()
        if received is None:
            os._exit(0)
        message, descriptors = received

        # Before the fork, so that the next one inherits it; an error goes to the client that asked, and only to it.
        failure = _imported(message["backend"])
        for descriptor in descriptors:
            _fork(descriptor, control, launcher, failure)


def _imported(backend: str) -> Message | None:
    """
    Import the modules of a sidecar of the *backend*; return the frame about a failure, or None.
    """
    try:
        _bridge.import_for(backend)
    except Exception as error:
        return _bridge.error_message(error)
    # A collection in a child would touch, and so copy, every page that it shares with this process.
    gc.freeze()
    return None


def _fork(descriptor: int, control: Channel, launcher: processes.Handle, failure: Message | None) -> None:
    try:
        pid = os.fork() if failure is None else -1
    except OSError as error:
        pid, failure = -1, _bridge.error_message(start_error("the sidecar of this node", error))

    if pid == 0:
        _be_sidecar(descriptor, control, launcher)
    channel = Channel.adopt(descriptor)
    if failure is not None:
        channel.send(failure)
    channel.close()


def _be_sidecar(descriptor: int, control: Channel, launcher: processes.Handle) -> NoReturn:
    # A fork does not inherit the kernel's signal for a parent's end.
    wake_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    control.close()
    close_all_but({0, 1, 2, descriptor, *launcher.inherited()})
    channel = Channel.adopt(descriptor)

    # This process is not a child of the client, which gets a handle of it through this message.
    with processes.own_descriptors() as descriptors:
        channel.send({"op": "born", "pid": os.getpid()}, descriptors)
    _bridge.serve(channel, launcher)
