"""Prints, as JSON, what libraries made of variables: the program's own, and those that it sets after their import."""

import ctypes
import json
import logging
import os
import sys
import tempfile

import torch
import torch._dynamo.config
import torch._inductor.config
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging import _internal

os.environ.update(json.loads(sys.argv[1]))


def library(name):
    """The library of that *name* which this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return ctypes.CDLL(next(line.split()[-1] for line in lines if name in line))


def schedule():
    """Return the kind and chunk size by which OpenMP divides loops."""
    kind, chunk = ctypes.c_int(), ctypes.c_int()
    library("libgomp").omp_get_schedule(ctypes.byref(kind), ctypes.byref(chunk))
    return kind.value, chunk.value


def shows_frames():
    """Return whether the errors of torch's native code contain a stack."""
    try:
        torch.zeros(2) + torch.zeros(3)
    except RuntimeError as error:
        return "Exception raised from" in str(error)


def logs_natively():
    """Return whether torch's native code logs its actions."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        os.dup2(kept, 2)
        file.seek(0)
        return b"[I" in file.read()  # there may be warnings in any case


def threads_of_mkl():
    """The line of torch's own account."""
    return next(line for line in torch.__config__.parallel_info().splitlines() if "mkl_get_max_threads" in line)


FACTS = {
    "OMP_SCHEDULE": schedule,
    "GOMP_CPU_AFFINITY": lambda: library("libgomp").omp_get_num_places(),
    "OPENBLAS_NUM_THREADS": lambda: library("libscipy_openblas").scipy_openblas_get_num_threads64_(),
    "MKL_NUM_THREADS": threads_of_mkl,
    "PYTORCH_JIT": lambda: torch.jit._state._enabled.enabled,
    "TORCH_LOGS": lambda: logging.getLogger("torch._dynamo").level,
    "TORCH_LOGS_OUT": lambda: len(logging.getLogger("torch").handlers),
    "TORCH_TRACE": lambda: _internal.LOG_TRACE_HANDLER.root_dir,
    "TORCH_DTRACE": lambda: _internal.GET_DTRACE_STRUCTURED,
    "TORCH_DISTRIBUTED_DEBUG": lambda: str(dist.get_debug_level()),
    "TORCH_CPP_LOG_LEVEL": logs_natively,
    "TORCH_SHOW_CPP_STACKTRACES": shows_frames,
    "TORCH_DEVICE_BACKEND_AUTOLOAD": lambda: "test_backend" in sys.modules,
    "TORCH_USE_RTLD_GLOBAL": lambda: hasattr(ctypes.CDLL(None), "PyInit__C"),
    "TORCH_COMPILE_DEBUG": lambda: torch._inductor.config.trace.enabled,
    "TORCHDYNAMO_VERBOSE": lambda: torch._dynamo.config.verbose,
    "TORCHINDUCTOR_MAX_AUTOTUNE": lambda: torch._inductor.config.max_autotune,
    "TORCHINDUCTOR_CACHE_DIR": cache_dir,
}
print(json.dumps({name: fact() for name, fact in FACTS.items()}))
