"""
What a test leaves behind in its worker: compared before and after, so that the next test does not meet it.

Rules of this file: what is compared is what another test could notice and would not expect; a look costs well under a
millisecond. Random numbers are no such thing, since each test begins with seeds of its own.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
_ENDING = 0.1
"""Seconds that threads may take to end by themselves."""
_OF_LIBRARIES = frozenset({"tqdm._monitor"})
"""Modules of threads that a library keeps for the life of the process."""
_IGNORED = ("PYTEST_CURRENT_TEST",)


def look() -> dict[str, Any]:
    """What there is now, by what to call it."""
    found: dict[str, Any] = {
        "threads": _threads(),
        "environment": {name: value for name, value in os.environ.items() if name not in _IGNORED},
        "folder": _folder(),
        "sys.path": list(sys.path),
        "descriptors": _descriptors(),
        "signal handlers": {each.name: signal.getsignal(each) for each in _SIGNALS},
        "logging": (logging.root.level, [*logging.root.handlers], logging.root.manager.disable),
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
    }
    torch = sys.modules.get("torch")
    return found if torch is None else found | _of_torch(torch)


def _threads() -> dict[int, str]:
    return {
        id(each): each.name
        for each in threading.enumerate()
        if each.is_alive() and type(each).__module__ not in _OF_LIBRARIES
    }


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(removed)"


def _descriptors() -> dict[int, str]:
    """Files, pipes and sockets; devices and what the kernel has for libraries are not counted."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the listing
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(("anon_inode:", "/dev/", "/proc/", "/memfd:", "/sys/")):
                found[int(name)] = target
    return found


def _of_torch(torch: Any) -> dict[str, Any]:
    asked: dict[str, Callable[[], Any]] = {
        "torch's default dtype": torch.get_default_dtype,
        "torch's default device": lambda: str(torch.get_default_device()),
        "torch's gradient mode": torch.is_grad_enabled,
        "torch's inference mode": torch.is_inference_mode_enabled,
        "torch's deterministic algorithms": lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "torch's number of threads": torch.get_num_threads,
        "torch's matmul precision": torch.get_float32_matmul_precision,
        "torch's anomaly mode": torch.is_anomaly_enabled,
        "torch.backends.cudnn": lambda: (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "process groups": lambda: _groups(torch),
    }
    found = {}
    for name, ask in asked.items():
        with contextlib.suppress(AttributeError, TypeError, RuntimeError):  # of another version
            found[name] = ask()
    return found


def _groups(torch: Any) -> dict[int, str]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not torch.distributed.is_available():
        return {}
    return {id(group): str(name) for group, name in c10d._world.pg_names.items()}


def changes(before: Mapping[str, Any]) -> tuple[str, ...]:
    """What is other than *before*, in words; what goes by itself in a moment is waited for."""
    found = _differences(before, look())
    if not found:
        return ()
    gc.collect()
    known = before["threads"]
    for thread in threading.enumerate():
        if id(thread) not in known and thread is not threading.current_thread():
            thread.join(_ENDING)
    return tuple(_differences(before, look()))


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    # What only torch tells is not known of a worker that has just imported it.
    return [
        text for name, value in after.items() if name in before and (text := _difference(name, before[name], value))
    ]


def _difference(name: str, before: Any, after: Any) -> str:
    if before == after:
        return ""
    if name in ("threads", "process groups"):
        new = [text for key, text in after.items() if key not in before]
        gone = [text for key, text in before.items() if key not in after]
        if name == "threads":  # one that has ended harms nobody
            return f"left {_many(new, 'thread')}" if new else ""
        return f"left {_many(new, 'process group')}" if new else f"destroyed {_many(gone, 'process group')}"
    if name == "descriptors":
        new = [target for number, target in after.items() if before.get(number) != target]
        return f"left {_many(new, 'open descriptor')}" if new else ""  # connections end, too, when a peer has
    if name == "environment":
        return f"changed the environment: {_of_variables(before, after)}"
    if name == "signal handlers":
        return f"changed the handler of {', '.join(each for each in after if after[each] != before[each])}"
    if name in ("logging", "sys.path"):
        return f"changed {name}" if name == "sys.path" else "changed the root logger"
    if name in ("sys.stdout", "sys.stderr"):
        return f"replaced {name}"
    return f"changed {name}: {before} is now {after}"


def _many(names: list[str], what: str) -> str:
    shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)} {what}{'s' * (len(names) != 1)} ({shown})"


def _of_variables(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    shown = [f"{name} {'is gone' if name not in after else f'= {after[name]!r}'}" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
