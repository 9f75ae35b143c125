"""
Snapshots of the state that one test can leave to the next in a worker, and their differences.

Rules of this file: a snapshot has the state that another test could notice and would not expect. It
takes well under a millisecond and imports nothing.
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
from elasticlib.processes import REAPER_PATH, links_to_children
from elasticlib.stacks import is_users
from elasticlib.testing.process_state import _config_modules, _replaced, _torch_modes
from elasticlib.utils import process_settings, read_proc_state

State: TypeAlias = dict[str, Any]
"""Values by the name that reports use; mappings are compared key by key."""

_SIGNALS = tuple(each for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP))
# Libraries keep these for the life of a process, from their first use on.
_THREADS_KEPT = frozenset({"tqdm._monitor"})
_PROCESSES_KEPT = (
    *("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker"),
    REAPER_PATH,
)
_VARIABLES_KEPT = ("PYTEST_CURRENT_", "TORCHINDUCTOR_CACHE_", "TRITON_CACHE_", "_TORCHINDUCTOR_")
"""Prefixes of the variables' names."""
_FILES_KEPT = ("anon_inode:", "/dev/", "/proc/", "/memfd:", "/sys/")
_LOGGERS_KEPT = frozenset({"torch.__trace"})
_HANDLERS_KEPT = frozenset({"torch.utils.data._utils.signal_handling"})
"""Modules that define the signal handlers."""


def look() -> State:
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
    compilers = _compiler_threads()
    found = {}
    for each in threading.enumerate():
        is_kept = type(each).__module__ in _THREADS_KEPT or each in compilers
        if each.is_alive() and not is_kept:
            found[each] = each.name
    return found


def _compiler_threads() -> Collection[Any]:
    """Return the threads with which torch compiles, for the life of the process."""
    module: Any = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    # Another version lacks the name.
    with contextlib.suppress(AttributeError):
        # The call of pool() would start the threads.
        if pool is not None and pool.cache_info().currsize:
            return pool()._threads  # type: ignore[no-any-return]
    return ()


def _processes() -> dict[int, str]:
    """Return the running children of this process with their command lines, by process id."""
    found = {}
    for number in _children():
        # The process may have just ended.
        with contextlib.suppress(OSError):
            command = _command(number)
            is_kept = any(each in command for each in _PROCESSES_KEPT)
            if _runs(number) and not is_kept:
                found[number] = command or f"process {number}"
    return found


def _children() -> list[int]:
    try:
        return [int(number) for number in _read(f"/proc/self/task/{os.getpid()}/children").split()]
    except OSError:
        # Some kernels have no such file.
        return []


def _command(number: int) -> str:
    return _read(f"/proc/{number}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _runs(number: int) -> bool:
    return read_proc_state(number) not in (None, "Z", "X")


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
    kept = {_kept_by("multiprocessing.resource_tracker", "_resource_tracker", "_fd")}
    kept.add(_kept_by("multiprocessing.forkserver", "_forkserver", "_forkserver_alive_fd"))
    # A launch in a test leaves its fork server for the next one.
    kept |= links_to_children()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # One descriptor is that of the listing itself.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            is_kept = target.startswith(_FILES_KEPT) or int(name) in kept
            # Installed files belong to a library, such as its fonts.
            if not is_kept and is_users(target):
                found[int(name)] = target

    return found


def _kept_by(module: str, owner: str, attribute: str) -> Any:
    return getattr(getattr(sys.modules.get(module), owner, None), attribute, None)


def _handlers() -> dict[str, Any]:
    found = {each.name: signal.getsignal(each) for each in _SIGNALS}
    return {name: each for name, each in found.items() if getattr(each, "__module__", "") not in _HANDLERS_KEPT}


def _loggers() -> dict[str, tuple[Any, ...]]:
    """Return the settings of all loggers that were configured, by name."""
    found = {}
    for name, each in logging.root.manager.loggerDict.copy().items():
        if isinstance(each, logging.Logger) and _is_set_up(each) and name not in _LOGGERS_KEPT:
            found[name] = each.level, [*each.handlers], each.propagate, each.disabled
    return found


def _is_set_up(logger: logging.Logger) -> bool:
    return bool(logger.level or logger.handlers or logger.disabled or not logger.propagate)


def _of_torch(torch: Any) -> State:
    readers: dict[str, Callable[[], Any]] = {
        # With its index, which means nothing to another rank.
        "torch's default device": lambda: str(torch.get_default_device()),
        "torch's inference mode": lambda: torch.is_inference_mode_enabled(),
        "torch's number of threads": lambda: torch.get_num_threads(),
        "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "process groups": groups,
    }
    found = _torch_modes.now()
    found["torch's configuration"] = {".".join(place): value for place, value in _config_modules.choices().items()}
    for name, ask in readers.items():
        # Another version lacks the name.
        with contextlib.suppress(AttributeError, TypeError, RuntimeError):
            found[name] = ask()

    return found


def groups() -> dict[tuple[int, str], str]:
    """Return the names of the process groups that exist, by their identities and names."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not sys.modules["torch.distributed"].is_available():
        return {}
    return {(id(group), str(name)): str(name) for group, name in c10d._world.pg_names.items()}


def collectives() -> int:
    """Return how many collectives this rank has called in its default group; 0 if unknown."""
    dist: Any = sys.modules.get("torch.distributed")
    # Another version lacks the name, and there may be no group.
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        return int(dist.group.WORLD._get_sequence_number_for_group())
    return 0


def taken_over(before: State, earlier: State, later: State) -> State:
    """Return *before* with the changes between *earlier* and *later* applied to it."""
    found = dict(before)
    for name, after in later.items():
        there: Any = earlier.get(name)
        if name not in earlier:
            found[name] = after
        elif after == there:
            continue
        elif isinstance(after, dict):
            found[name] = _parts_taken_over(found[name], there, after)
        elif found[name] == there:
            # Otherwise the test had changed it by then.
            found[name] = after

    return found


def _parts_taken_over(
    before: Mapping[Any, Any], earlier: Mapping[Any, Any], later: Mapping[Any, Any]
) -> dict[Any, Any]:
    gone = earlier.keys() - later.keys()
    found = {key: value for key, value in before.items() if key not in gone}
    for key, value in later.items():
        if key not in earlier or earlier[key] != value:
            found[key] = value
    return found


def differences(before: State, after: State) -> tuple[str, ...]:
    """Describe what a test has changed."""
    # A worker that has just imported torch has no earlier values of torch's state.
    known = {name: value for name, value in after.items() if name in before}
    every = [_difference(name, before[name], value) for name, value in known.items()]
    return tuple(filter(None, every))


def _difference(name: str, before: Any, after: Any) -> str:
    """Describe how the state *name* differs; empty if it does not, or if the change is harmless."""
    if before == after:
        return ""
    if name in _DESCRIBED:
        return _DESCRIBED[name](name, before, after)
    if isinstance(before, dict) and isinstance(after, dict):
        return f"changed {name}: {_of_parts(before, after)}"
    return f"changed {name}: {_shown(before)} is now {_shown(after)}"


# One function for each kind of state; it gets the name and the values before and after.


def _left(name: str, before: Mapping[Any, str], after: Mapping[Any, str]) -> str:
    # A missing one is harmless: threads end, and so do connections when a peer closes them.
    new = _new(before, after)
    return f"left {_many(new, _LEFT[name])}" if new else ""


def _groups_left(name: str, before: Mapping[Any, str], after: Mapping[Any, str]) -> str:
    if _new(before, after):
        return _left(name, before, after)
    gone = [text for key, text in before.items() if key not in after]
    return f"destroyed {_many(gone, _LEFT[name])}"


def _new(before: Mapping[Any, str], after: Mapping[Any, str]) -> list[str]:
    return [text for key, text in after.items() if before.get(key) != text]


def _environment_changed(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    return f"changed the environment: {_of_variables(before, after)}"


def _handlers_changed(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    changed = _changed_keys(before, after)
    return f"changed the handler of {_listed(changed)}" if changed else ""


def _loggers_changed(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    # Unlike a signal handler, a logger's settings can also disappear.
    changed = [*_changed_keys(before, after), *(before.keys() - after.keys())]
    return f"changed the logger {_listed(changed)}" if changed else ""


def _changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [key for key in after if before.get(key) != after[key]]


def _functions_changed(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    replaced = _replaced.replaced(before, after)
    return f"replaced {_listed(replaced)}" if replaced else ""


def _changed(name: str, before: Any, after: Any) -> str:
    return f"changed {name}" if name == "sys.path" else f"changed the {name}"


def _stream_replaced(name: str, before: Any, after: Any) -> str:
    return f"replaced {name}"


_DESCRIBED: dict[str, Callable[[str, Any, Any], str]] = {
    "threads": _left,
    "processes": _left,
    "descriptors": _left,
    "process groups": _groups_left,
    "environment": _environment_changed,
    "signal handlers": _handlers_changed,
    "loggers": _loggers_changed,
    "functions": _functions_changed,
    "sys.path": _changed,
    "root logger": _changed,
    "warnings filters": _changed,
    "sys.stdout": _stream_replaced,
    "sys.stderr": _stream_replaced,
}
"""Descriptions by the name of a state; other states are shown with their values."""


_LEFT = {
    "threads": ("thread", "threads"),
    "processes": ("process", "processes"),
    "descriptors": ("open descriptor", "open descriptors"),
    "process groups": ("process group", "process groups"),
}
"""Nouns for reports, in the singular and the plural."""


def _many(names: list[str], what: tuple[str, str]) -> str:
    return f"{counted(len(names), *what)} ({_listed(names)})"


def _listed(names: list[str]) -> str:
    shown = [each[:80] for each in sorted(names)[:5]]
    if len(names) > 5:
        shown.append("...")
    return ", ".join(shown)


def _shown(value: object) -> str:
    return str(value)[:80]


def _of_parts(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    shown = []
    for name in {**before, **after}:
        value = before.get(name, "the default")
        value_now = after.get(name, "the default")
        if value != value_now:
            shown.append(f"{name} from {_shown(value)} to {_shown(value_now)}")
    return _first_three(shown)


def _of_variables(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    shown = []
    for name in sorted({*before, *after}):
        if name not in after:
            shown.append(f"{name} is gone")
        elif before.get(name) != after[name]:
            shown.append(f"{name} = {after[name]!r}")
    return _first_three(shown)


def _first_three(shown: list[str]) -> str:
    text = ", ".join(shown[:3])
    return f"{text} and {len(shown) - 3} more" if len(shown) > 3 else text
