"""
Settings of a process that code can change: those of the kernel, of Python and of loaded libraries.

All code that compares the state of a process at two times uses this list.

Rules of this file: `process_settings` imports nothing and takes a few microseconds for each
setting. Settings that the version of a library lacks are left out. State that the normal use of a
library changes, such as the flags of a decimal context, is not a setting.
"""

from __future__ import annotations

import _locale
import contextlib
import gc
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from elasticlib.stacks import is_users

_UMASK = re.compile(rb"^Umask:\s*(\d+)", re.MULTILINE)
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)
_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_halves = [sys.float_info.min, 2.0]


def process_settings() -> dict[str, Any]:
    """Return the value of each setting, by its name in messages; values are compared by ``==``."""
    found = {name: ask() for name, ask in _OF_PROCESS.items()}
    for name, (module, of_library) in _OF_LIBRARIES.items():
        if (library := sys.modules.get(module)) is not None:
            # Another version lacks the name, and a library may be half imported.
            with contextlib.suppress(AttributeError, TypeError, RuntimeError):
                found[name] = of_library(library)
    return found


# Settings of the kernel.


def _umask() -> str:
    try:
        with open("/proc/thread-self/status", "rb", buffering=0) as file:
            found = _UMASK.search(file.read(1024))
    except OSError:
        # /proc may be missing.
        return ""
    return f"0o{found[1].decode().lstrip('0') or '0'}" if found else ""


def _limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(number) for name, number in _LIMITS.items()}


def _blocked_signals() -> list[str]:
    numbers = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    return [getattr(number, "name", str(number)) for number in numbers]


def _running_timers() -> list[str]:
    # Without the remaining time, which differs at each call.
    return [name for name in _TIMERS if signal.getitimer(getattr(signal, name))[0]]


def _flushes_denormals() -> bool:
    smallest, two = _halves
    return smallest / two == 0.0


# Settings of Python.


def _own(hook: Any) -> Any:
    """Return *hook* if it is the user's own; None for Python's and for those of libraries."""
    code = getattr(hook, "__code__", None)
    return None if code is None or not is_users(code.co_filename) else hook


_OF_PROCESS: dict[str, Callable[[], Any]] = {
    "umask": _umask,
    "resource limits": _limits,
    "niceness": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "CPU affinity": lambda: sorted(os.sched_getaffinity(0)),
    "blocked signals": _blocked_signals,
    "running timers": _running_timers,
    "flushing of denormal numbers": _flushes_denormals,
    "locale": lambda: _locale.setlocale(_locale.LC_ALL, None),
    "time zone": lambda: time.tzname,
    "garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
    "recursion limit": sys.getrecursionlimit,
    "switch interval": sys.getswitchinterval,
    "trace function": sys.gettrace,
    "profile function": sys.getprofile,
    "sys.excepthook": lambda: _own(sys.excepthook),
    "sys.displayhook": lambda: _own(sys.displayhook),
    "sys.unraisablehook": lambda: _own(sys.unraisablehook),
    "threading.excepthook": lambda: _own(threading.excepthook),
}


# Settings of libraries.


def _decimal_context(decimal: Any) -> dict[str, Any]:
    context = decimal.getcontext()
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    traps = [kind.__name__ for kind, is_trapped in context.traps.items() if is_trapped]
    return {name: getattr(context, name) for name in names} | {"traps": sorted(traps)}


def _start_method(multiprocessing: Any) -> str:
    # The first use of the default method also sets it, which must not count as a change.
    return str(multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0])


def _numbers(names: tuple[str, ...]) -> Callable[[Any], dict[str, int]]:
    return lambda module: {name: len(getattr(module, name, ())) for name in names}


_OF_LIBRARIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "warnings filters": ("warnings", lambda warnings: [*warnings.filters]),
    "decimal context": ("decimal", _decimal_context),
    "multiprocessing's start method": ("multiprocessing", _start_method),
    "socket's default timeout": ("socket", lambda socket: socket.getdefaulttimeout()),
    "numpy's handling of errors": ("numpy", lambda numpy: numpy.geterr()),
    "numpy's print options": ("numpy", lambda numpy: numpy.get_printoptions()),
    "torch's print options": ("torch._tensor_str", lambda module: dict(vars(module.PRINT_OPTS))),
    "torch's sharing strategy": ("torch.multiprocessing", lambda module: module.get_sharing_strategy()),
    "torch's repeated warnings": ("torch", lambda torch: torch.is_warn_always_enabled()),
    "torch's dispatch modes": ("torch", lambda torch: torch._C._len_torch_dispatch_stack()),
    "torch's hooks for all modules": ("torch.nn.modules.module", _numbers(_HOOKS)),
    "torch's hooks for all optimizers": ("torch.optim.optimizer", _numbers(_OPTIMIZER_HOOKS)),
}
