"""The first steps of a process that was just forked, up to the spawner of a launch."""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from elasticlib import processes
from elasticlib.processes import (
    STOP_SIGNALS,
    Channel,
    above_standard_streams,
    adopt_orphans,
    close_all_but,
    guard_child,
    kill_descendants,
    outlive_parent,
    settle_signals,
    start_error,
)
from elasticlib.workers.spawner._detached import Detached
from elasticlib.workers.spawner._spawner import Spawner


def be_spawner(
    descriptor: int,
    parent: int,
    outliving: processes.SharedSessions,
    keep: frozenset[int] = frozenset(),
    changed: dict[str, str | None] | None = None,
    call: Callable[[], Any] | None = None,
    guardian: int = 0,
) -> NoReturn:
    """
    Turn this just-forked process into the spawner that gets its orders over *descriptor*.

    It ends when *parent* does, unless *guardian* adopts it then.
    """
    channel = Channel.adopt(descriptor)
    try:
        os.setsid()
        settle_signals()

        # Blocked as well: a signal that reaches a worker before it has its own handlers waits,
        # and is not lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        adopt_orphans()
        outlive_parent()

        # Three descriptors a worker; the workers themselves get the caller's limit back.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        Spawner(channel, parent, keep, Detached(outliving), changed or {}, call, guardian).serve()
    # The launcher must learn of every failure, and no worker may stay.
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"the spawner process failed: {type(error).__name__}: {error}"
        channel.send({"op": "broken", "why": f"{why} ({os.path.basename(last.filename)}, line {last.lineno})"})
        kill_descendants()
    finally:
        os._exit(1)


def tell_forked(descriptor: int, child: int) -> None:
    """
    Report *child* to the launch at the other end of *descriptor*, and close that.

    The child itself could be stopped before it can report.
    """
    launch = Channel.adopt(descriptor)
    launch.send({"op": "forked", "pid": child})
    launch.close()


def guard_spawner(channel: Channel, launcher: int, call: Callable[[], Any]) -> NoReturn:
    """
    Fork the spawner, with its orders over the *channel*, from a fork of the *launcher*; then be
    its reaper.
    """
    try:
        os.setsid()
        settle_signals()
        adopt_orphans()
        outlive_parent()
        me = os.getpid()
        descriptor = above_standard_streams(channel.fileno())
        channel.close()
        while (filler := os.open(os.devnull, os.O_RDWR)) < 3:
            # The caller may have closed its streams: no other descriptor may get their numbers.
            pass

        os.close(filler)
        outliving = processes.SharedSessions.new()
        try:
            child = os.fork()
        except OSError as error:
            why = str(start_error("the spawner process", error))
            Channel.adopt(descriptor).send({"op": "broken", "why": why})
            os._exit(1)

        if child == 0:
            be_spawner(descriptor, me, outliving, call=call)
        tell_forked(descriptor, child)

        # A program that waits for the last copy of the caller's file to close must not wait for
        # this process.
        close_all_but({0, 1, 2, outliving.fileno()})
        guard_child(launcher, child, outliving)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
