"""
The state of a worker that one test can leave to the next, at one moment, and what differs between two moments.

Rules of this file: what is looked at is what another test could notice and would not expect; a look costs well under a
millisecond and imports nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from elasticlib._wording import counted
from elasticlib.stacks import is_users
from elasticlib.testing.process_state import _config_modules, _replaced, _torch_modes
from elasticlib.utils import process_settings

State: TypeAlias = dict[str, Any]
"""By what to call it; the parts of what is a mapping are compared one by one."""

_SIGNALS = tuple(each for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP))
# What libraries keep for the life of a process, from where they first need it.
_THREADS_KEPT = frozenset({"tqdm._monitor"})
_PROCESSES_KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
_VARIABLES_KEPT = ("PYTEST_CURRENT_", "TORCHINDUCTOR_CACHE_", "TRITON_CACHE_", "_TORCHINDUCTOR_")
"""The beginnings of their names."""
_FILES_KEPT = ("anon_inode:", "/dev/", "/proc/", "/memfd:", "/sys/")
_LOGGERS_KEPT = frozenset({"torch.__trace"})
_HANDLERS_KEPT = frozenset({"torch.utils.data._utils.signal_handling"})
"""Modules of signal handlers."""


def look() -> State:
    """What there is now."""
    found: State = {
        "threads": _threads(),
        "processes": _processes(),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES_KEPT)},
        "folder": _folder(),
        "sys.path": [*sys.path],
        "descriptors": _descriptors(),
        "signal handlers": _handlers(),
        "root logger": (logging.root.level, [*logging.root.handlers], logging.root.manager.disable),
        "loggers": _loggers(),
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "functions": _replaced.functions(),
        **process_settings(),
    }
    torch = sys.modules.get("torch")
    return found if torch is None else found | _of_torch(torch)


def _threads() -> dict[threading.Thread, str]:
    compilers: Collection[Any] = ()
    pool = getattr(getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None), "pool", None)
    with contextlib.suppress(AttributeError):  # of another version
        if pool is not None and pool.cache_info().currsize:
            compilers = pool()._threads
    return {
        each: each.name
        for each in threading.enumerate()
        if each.is_alive() and type(each).__module__ not in _THREADS_KEPT and each not in compilers
    }


def _processes() -> dict[int, str]:
    """Those that this one has started and that run, each with its command line."""
    found = {}
    with contextlib.suppress(OSError):  # a kernel that does not tell
        for number in _read(f"/proc/self/task/{os.getpid()}/children").split():
            with contextlib.suppress(OSError):  # it has just ended
                stat, line = _read(f"/proc/{int(number)}/stat"), _read(f"/proc/{int(number)}/cmdline")
                command = line.replace(b"\0", b" ").decode(errors="replace").strip()
                if stat.rpartition(b") ")[2][:1] not in b"ZX" and not any(each in command for each in _PROCESSES_KEPT):
                    found[int(number)] = command or f"process {int(number)}"
    return found


def _read(file: str) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(removed)"


def _descriptors() -> dict[int, str]:
    """Files, pipes and sockets."""
    kept = {_kept_by("multiprocessing.resource_tracker", "_resource_tracker", "_fd")}
    kept.add(_kept_by("multiprocessing.forkserver", "_forkserver", "_forkserver_alive_fd"))
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the listing
            target = os.readlink(f"/proc/self/fd/{name}")
            # Installed files are a library's own, such as its fonts.
            if not target.startswith(_FILES_KEPT) and int(name) not in kept and is_users(target):
                found[int(name)] = target
    return found


def _kept_by(module: str, owner: str, attribute: str) -> Any:
    return getattr(getattr(sys.modules.get(module), owner, None), attribute, None)


def _handlers() -> dict[str, Any]:
    found = {each.name: signal.getsignal(each) for each in _SIGNALS}
    return {name: each for name, each in found.items() if getattr(each, "__module__", "") not in _HANDLERS_KEPT}


def _loggers() -> dict[str, tuple[Any, ...]]:
    """Those that somebody has set up."""
    return {
        name: (each.level, [*each.handlers], each.propagate, each.disabled)
        for name, each in logging.root.manager.loggerDict.copy().items()
        if isinstance(each, logging.Logger)
        and (each.level or each.handlers or each.disabled or not each.propagate)
        and name not in _LOGGERS_KEPT
    }


def _of_torch(torch: Any) -> State:
    asked: dict[str, Callable[[], Any]] = {
        # With its index, which is of no meaning to another rank.
        "torch's default device": lambda: str(torch.get_default_device()),
        "torch's inference mode": lambda: torch.is_inference_mode_enabled(),
        "torch's number of threads": lambda: torch.get_num_threads(),
        "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "process groups": groups,
    }
    found = _torch_modes.now()
    found["torch's configuration"] = {".".join(place): value for place, value in _config_modules.choices().items()}
    for name, ask in asked.items():
        with contextlib.suppress(AttributeError, TypeError, RuntimeError):  # of another version
            found[name] = ask()
    return found


def groups() -> dict[tuple[int, str], str]:
    """The process groups that there are, by their identities and names, each with its name."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not sys.modules["torch.distributed"].is_available():
        return {}
    return {(id(group), str(name)): str(name) for group, name in c10d._world.pg_names.items()}


def collectives() -> int:
    """How many this rank has called in its default process group; 0 where that is not known."""
    dist: Any = sys.modules.get("torch.distributed")
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # of another version, or of no group
        return int(dist.group.WORLD._get_sequence_number_for_group())
    return 0


def taken_over(before: State, earlier: State, later: State) -> State:
    """*before*, as if what differs between *earlier* and *later* had been so then."""
    found = dict(before)
    for name, after in later.items():
        there: Any = earlier.get(name)
        if name not in earlier:
            found[name] = after
        elif after == there:
            continue
        elif isinstance(after, dict):
            gone = there.keys() - after.keys()
            new = {key: value for key, value in after.items() if key not in there or there[key] != value}
            found[name] = {key: value for key, value in found[name].items() if key not in gone} | new
        elif found[name] == there:
            found[name] = after
    return found


def differences(before: State, after: State) -> tuple[str, ...]:
    """What a test has changed, in words."""
    # What only torch tells is not known of a worker that has just imported it.
    every = (_difference(name, before[name], value) for name, value in after.items() if name in before)
    return tuple(text for text in every if text)


def _difference(name: str, before: Any, after: Any) -> str:
    if before == after:
        return ""
    if name in _LEFT:
        # One that is gone harms nobody: threads end, and so do connections when a peer ends them.
        new = [text for key, text in after.items() if before.get(key) != text]
        if name == "process groups" and not new:
            return f"destroyed {_many([text for key, text in before.items() if key not in after], _LEFT[name])}"
        return f"left {_many(new, _LEFT[name])}" if new else ""
    if name == "environment":
        return f"changed the environment: {_of_variables(before, after)}"
    if name in ("signal handlers", "loggers"):
        changed = [key for key in after if before.get(key) != after[key]]
        changed += [key for key in before if key not in after and name == "loggers"]
        what = "the handler of" if name == "signal handlers" else "the logger"
        return f"changed {what} {_listed(changed)}" if changed else ""
    if name == "functions":
        replaced = _replaced.replaced(before, after)
        return f"replaced {_listed(replaced)}" if replaced else ""
    if name in ("sys.path", "root logger", "warnings filters"):
        return f"changed {'the ' * (name != 'sys.path')}{name}"
    if name in ("sys.stdout", "sys.stderr"):
        return f"replaced {name}"
    if isinstance(before, dict) and isinstance(after, dict):
        return f"changed {name}: {_of_parts(before, after)}"
    return f"changed {name}: {_shown(before)} is now {_shown(after)}"


_LEFT = {
    "threads": ("thread", "threads"),
    "processes": ("process", "processes"),
    "descriptors": ("open descriptor", "open descriptors"),
    "process groups": ("process group", "process groups"),
}
"""What is there or not, in the singular and the plural."""


def _many(names: list[str], what: tuple[str, str]) -> str:
    return f"{counted(len(names), *what)} ({_listed(names)})"


def _listed(names: list[str]) -> str:
    return ", ".join([each[:80] for each in sorted(names)[:5]] + ["..."] * (len(names) > 5))


def _shown(value: object) -> str:
    return str(value)[:80]


def _of_parts(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The parts of a setting that differ; one that is not there is at its default."""
    default = "the default"
    names = [name for name in {**before, **after} if before.get(name, default) != after.get(name, default)]
    shown = [f"{name} from {_shown(before.get(name, default))} to {_shown(after.get(name, default))}" for name in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _of_variables(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    shown = [f"{name} {'is gone' if name not in after else f'= {after[name]!r}'}" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
