"""Prints what a program can see of itself, as JSON, to compare ``python -u`` and a worker; not how text is buffered."""

import atexit
import inspect
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import warnings

import torch  # noqa: F401 - it leaves filters and handlers of its own


def first_signals() -> dict[str, str]:
    return {s.name: str(signal.getsignal(s)) for s in signal.Signals}


facts = {
    "argv": sys.argv,
    "command": [sys.orig_argv, open("/proc/self/cmdline").read().rstrip("\0").split("\0")],
    "path0": sys.path[0],
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": None if __spec__ is None else __spec__.name,
    "main is here": sys.modules["__main__"].__dict__ is globals(),
    "own source": inspect.getsource(first_signals).splitlines()[0] if os.path.exists(__file__) else "",
    "code": first_signals.__code__.co_filename,
    "names": sorted(n for n in globals() if n.startswith("__") and n not in ("__annotations__", "__warningregistry__")),
    "process": multiprocessing.current_process().name,
    "daemon": multiprocessing.current_process().daemon,
    "parent": str(multiprocessing.parent_process()),
    "start method": multiprocessing.get_start_method(allow_none=True),
    "children": [str(child) for child in multiprocessing.active_children()],
    "threads": [thread.name for thread in threading.enumerate()],
    "main thread": threading.current_thread() is threading.main_thread(),
    "signals": first_signals(),
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "umask": [os.umask(0o77), os.umask(0o22)][0],
    "cwd": os.getcwd(),
    "streams": [
        [
            s.fileno(),
            s.isatty(),
            s.encoding,
            s.errors,
            s.mode,
            s.name,
            s.seekable(),
            isinstance(s.buffer, io.FileIO),
        ]
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:4],
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "affinity": sorted(os.sched_getaffinity(0)),
    "filters": [str(f) for f in warnings.filters],
    "tracing": [str(sys.gettrace()), str(sys.getprofile()), str(sys.excepthook)],
    "interpreter": [sys.executable, sys.version, sys.prefix],
    "flags": [str(sys.flags), sys._xoptions, sys.warnoptions, sys.get_int_max_str_digits()],
    "stdin": sys.stdin.readline(),
}
print(json.dumps(facts, sort_keys=True))
sys.stdout.reconfigure(encoding="ascii", errors="backslashreplace")
print("\N{BULLET}")
atexit.register(lambda: print("exit handler", flush=True))
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread", flush=True))).start()
