"""How a process that was just forked becomes the spawner of a launch."""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from elasticlib._wire import Channel
from elasticlib.workers import _reaper
from elasticlib.workers.spawner._spawner import Spawner


def be_spawner(
    descriptor: int,
    parent: int,
    keep: frozenset[int] = frozenset(),
    changed: dict[str, str | None] | None = None,
    call: Callable[[], Any] | None = None,
) -> NoReturn:
    """Turn this just-forked process into the spawner whose orders come over *descriptor*."""
    channel = Channel.adopt(descriptor)
    try:
        os.setsid()
        _reaper.settle_signals()
        # Blocked as well: what reaches a worker before it has its own handlers waits, and is not lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _reaper.STOP_SIGNALS)
        _reaper.adopt_orphans()
        _reaper.outlive_parent()
        # Three descriptors a worker; the workers themselves get the caller's limit back.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        Spawner(channel, parent, keep, changed or {}, call).serve()
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"the process that starts the workers failed: {type(error).__name__}: {error}"
        channel.send({"op": "broken", "why": f"{why} ({os.path.basename(last.filename)}, line {last.lineno})"})
        _reaper.sweep()
    finally:
        os._exit(1)
