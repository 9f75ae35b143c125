"""Prints, as JSON, what came of thirty habits that projects have when they are imported; fails in its first attempt."""

import asyncio
import atexit
import builtins
import concurrent.futures
import contextvars
import decimal
import functools
import gc
import importlib
import importlib.metadata
import importlib.resources
import inspect
import io
import json
import locale
import logging
import multiprocessing
import os
import pickle
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import typing
import warnings
import weakref

import numpy
import torch

HABITS = {}


def habit(function):
    """Register *function* under its name for the run."""
    HABITS[function.__name__] = function
    return function


class Plain:
    """A class that is pickled by its name."""

    number: "int" = 3


@habit
def reads_its_own_source():
    return inspect.getsource(Plain), inspect.getsourcefile(Plain) == os.path.abspath(__file__)


@habit
def reads_package_data():
    folder = importlib.resources.files("numpy")
    return folder.joinpath("__init__.py").is_file(), pkgutil.get_data("numpy", "version.py")[:20].decode()


@habit
def reads_versions():
    return importlib.metadata.version("torch"), len(importlib.metadata.entry_points()) > 0


@habit
def makes_itself_lazy():
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            return f"lazy {name}"

    sys.modules["lazy_one"] = Lazy("lazy_one")
    return importlib.import_module("lazy_one").anything


@habit
def wraps_open():
    kept, calls = builtins.open, []

    @functools.wraps(kept)
    def opened(*args, **kwargs):
        calls.append(args[0])
        return kept(*args, **kwargs)

    builtins.open = opened
    try:
        with open(__file__, encoding="utf-8") as file:
            file.readline()
    finally:
        builtins.open = kept
    return len(calls), kept is io.open, type(kept).__name__, kept.__module__


@habit
def knows_functions_by_identity():
    plain = (os.remove, os.stat, subprocess.Popen.__init__, importlib.import_module, __import__, socket.socket.connect)
    return [(type(each).__name__, each.__module__ if hasattr(each, "__module__") else "") for each in plain]


@habit
def binds_methods_of_the_environment():
    get, put = os.environ.get, os.environ.__setitem__
    put("HABIT", "1")
    return get("HABIT"), os.environ.pop("HABIT"), type(os.environ._data).__name__, "HABIT" in os.environ


@habit
def filters_warnings():
    before = len(warnings.filters)
    warnings.filterwarnings("ignore", message="a habit")
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("a habit", stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
    return before, len(warnings.filters), [str(each.message) for each in caught]


@habit
def sets_up_logging():
    stream = io.StringIO()
    before = len(logging.getLogger().handlers), logging.getLogger().level, logging.lastResort is not None
    logging.basicConfig(stream=stream, format="%(name)s %(message)s")
    logging.getLogger("habit").warning("said")
    return before, stream.getvalue(), logging.getLogger("torch").propagate


@habit
def sets_the_locale():
    return locale.setlocale(locale.LC_ALL), locale.setlocale(locale.LC_NUMERIC, "C"), locale.getpreferredencoding()


@habit
def handles_signals():
    found = [str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)]
    received = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    signal.raise_signal(signal.SIGUSR1)
    return [each.split(" at ")[0] for each in found], received


@habit
def registers_exits():
    before = atexit._ncallbacks()
    atexit.register(print, end="")
    return atexit._ncallbacks() - before


@habit
def chooses_a_start_method():
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn")
    return before, multiprocessing.get_start_method(), multiprocessing.current_process().name


@habit
def chooses_how_tensors_are_shared():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    return before, torch.multiprocessing.get_sharing_strategy()


@habit
def sets_decimals():
    decimal.getcontext().prec += 2
    return decimal.getcontext().prec


@habit
def seeds():
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


@habit
def limits_recursion():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 100)
    return before, sys.getrecursionlimit(), sys.getswitchinterval()


@habit
def imports_by_a_finder():
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.util.spec_from_loader(name, Loader()) if name == "made_up" else None

    class Loader:
        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            module.value = 4

    before = [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path]
    sys.meta_path.insert(0, Finder)
    value = importlib.import_module("made_up").value
    sys.meta_path.remove(Finder)
    return before, value, len(sys.path_hooks)


@habit
def hooks_exceptions():
    plain = sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__
    return *plain, sys.unraisablehook is sys.__unraisablehook__, sys.displayhook is sys.__displayhook__


@habit
def looks_at_the_collector():
    return gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_debug()


@habit
def chooses_types():
    before = str(torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    found = str(torch.ones(1).dtype)
    torch.set_default_dtype(torch.float32)
    return before, found, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()


@habit
def sets_threads():
    torch.set_num_interop_threads(3)
    torch.set_num_threads(2)
    return torch.get_num_interop_threads(), torch.get_num_threads()


@habit
def pickles():
    return pickle.loads(pickle.dumps(Plain())).number, Plain.__module__, typing.get_type_hints(Plain)["number"].__name__


@habit
def finalizes():
    ended, one = [], Plain()
    weakref.finalize(one, ended.append, 1)
    del one
    return ended, threading.active_count(), threading.main_thread() is threading.current_thread()


@habit
def has_contexts():
    variable = contextvars.ContextVar("habit", default=5)
    return variable.get(), len(list(contextvars.copy_context()))


@habit
def runs_a_loop():
    async def later():
        await asyncio.sleep(0)
        return 6

    return asyncio.run(later()), type(asyncio.get_event_loop_policy()).__name__


@habit
def starts_programs():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(subprocess.run, [sys.executable, "-c", "print(7)"], capture_output=True, check=False)
        return done.result().stdout.decode()


@habit
def reloads():
    former = sys.modules.pop("json.decoder")
    again = importlib.import_module("json.decoder")
    sys.modules["json.decoder"] = former
    return again is former, importlib.reload(sys.modules["colorsys" if "colorsys" in sys.modules else "stat"]).__name__


@habit
def looks_for_folders():
    return tempfile.gettempdir(), tempfile.tempdir, os.path.expanduser("~"), sys.path[0] == os.path.dirname(__file__)


@habit
def knows_its_streams():
    streams = sys.stdin, sys.stdout, sys.stderr
    return [(type(each).__name__, each.encoding, each.errors, each.fileno()) for each in streams]


def tried(function):
    """Return the result of *function*, or the text of its exception."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


print(json.dumps({name: tried(function) for name, function in HABITS.items()}), flush=True)
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and len(sys.argv) > 1:
    os._exit(1)
