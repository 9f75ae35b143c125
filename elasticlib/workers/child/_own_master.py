"""
Process groups at an address that the program itself has set, as tutorials do:
``os.environ["MASTER_PORT"] = "12355"``.

Under a launcher torch lets no rank host a store: the launcher's own exists, at the address that
workers get. At any other address all ranks would wait half an hour for a store that no rank
opens.

If a worker serves a pool, a test or a cell, and its job has one node, rank 0 opens that store.
Elsewhere the address may belong to a store outside of the job. Then ranks wait for it, as torch
does, and a warning names the cause if the address does not answer.

Rules of this file: the launcher's address, and any other on its port, stays the launcher's. Only
torch's look at its variable is changed.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from elasticlib._clock import monotonic
from elasticlib.processes import start_thread
from elasticlib.workers.child._serving import when_imported

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_MODULE, _FUNCTION = "torch.distributed.rendezvous", "_create_c10d_store"
NAME = "elasticlib-own-master"
"""Name of the thread that checks whether the address is open."""
_PATIENCE = 4.0
"""Seconds until the warning if the address does not answer."""
_PAUSE = 0.5


def attach(variables: Mapping[str, str], *, is_hosted: bool) -> None:
    """
    Handle the addresses of process groups in a worker with these *variables*.

    *is_hosted*: rank 0 opens their stores.
    """
    port = variables.get("MASTER_PORT", "")
    if variables.get(_AGENT_STORE) == "True" and port.isdecimal():
        hosted = is_hosted and variables.get("GROUP_WORLD_SIZE") == "1"
        # One warning for each node is enough.
        speaks = variables.get("LOCAL_RANK") == "0"
        when_imported(_MODULE, lambda: _wrap(sys.modules[_MODULE], int(port), is_hosted=hosted, speaks=speaks))


def _wrap(module: Any, launchers_port: int, *, is_hosted: bool, speaks: bool) -> None:
    create = getattr(module, _FUNCTION, None)
    if not callable(create):
        # Another version of torch does it in another way.
        return

    @functools.wraps(create)
    def create_at(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if port == launchers_port or os.environ.get(_AGENT_STORE) != "True":
            return create(hostname, port, *args, **kwargs)
        if is_hosted:
            return _without_agent_store(lambda: create(hostname, port, *args, **kwargs))

        came = threading.Event()
        if speaks:
            start_thread(threading.Thread(target=_warn_of_silence, args=(hostname, port, came), name=NAME, daemon=True))
        try:
            return create(hostname, port, *args, **kwargs)
        finally:
            came.set()

    setattr(module, _FUNCTION, create_at)


def _without_agent_store(create: Callable[[], Any]) -> Any:
    del os.environ[_AGENT_STORE]
    try:
        return create()
    finally:
        os.environ[_AGENT_STORE] = "True"


def _warn_of_silence(hostname: str, port: int, came: threading.Event) -> None:
    """Warn unless the address opens, or *came* is set, within the time limit."""
    deadline = monotonic() + _PATIENCE
    while not came.wait(_PAUSE):
        if _is_open(hostname, port):
            return
        if monotonic() >= deadline:
            print(
                f"elasticlib: the ranks wait for a store at {hostname}:{port}, where no process listens: "
                "the program sets MASTER_ADDR, MASTER_PORT or an init_method itself, but under a launcher "
                "no rank opens a store; leave them as the launcher has set them",
                file=sys.stderr,
                flush=True,
            )
            return


def _is_open(hostname: str, port: int) -> bool:
    try:
        socket.create_connection((hostname, port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True
