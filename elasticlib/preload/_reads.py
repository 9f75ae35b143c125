"""
Environment variables that a fork server depends on: a launch with other values needs another fork
server.

Each launch sends its variables to its workers. The imports for every program (`_allowed`) read
the variables in the lists below. A test compares the lists with the lookups of a real import. The
variables of a module that `preload` names are unknown, so any variable counts.

PURE: takes two environments and the list of imports, returns a verdict.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticlib.workers import CUDA_DEVICES_VARIABLE, THREADS_VARIABLE

INTERPRETER = (
    "PYTHON*",
    "LD_*",  # the dynamic loader
    "GLIBC_TUNABLES",
    "GLIBCXX_TUNABLES",
    "MALLOC_*",
    "TCMALLOC_*",
    "LANG",  # the encoding of files and streams
    "LC_*",
    "TZ",
    "OPENSSL_*",
    "COVERAGE_*",  # hooks in .pth files, which run before anything could observe them
    "SETUPTOOLS_USE_DISTUTILS",
)
"""Read by each Python program at its start."""
LIBRARIES = (
    "OMP_*",
    "GOMP_*",
    "ACC_*",  # OpenACC, by GNU's OpenMP
    "MKL_*",
    "MKLDNN_*",
    "DNNL_*",
    "ONEDNN_*",
    "OPENBLAS_*",
    "GOTO_NUM_THREADS",
    "GFORTRAN_*",
    "NPY_*",
    "NUMPY_*",
    "TORCH*",
    "PYTORCH_*",
    "KINETO_*",
    "CUDA_*",
    "NCCL_*",
    "CUBLAS*",
    "CASK_*",
    "NVRTC_*",
    "LIBNVVM_*",
    "NV_NVVM_VERSION",
    "AS_SECURE_LOG_FILE",
    "LLVM_*",
    "HIP_*",  # ROCm's and XPU's by the names that are commonly used: no test has seen them
    "HSA_*",
    "ROCR_*",
    "AMD_*",
    "ZE_*",
    "SYCL_*",
    "INTEL_LIBITTNOTIFY64",
    "I_MPI_*",  # MKL: the processes of MPI among which it divides the CPUs
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    # From here on by Python code: torch, torch._dynamo, torch._inductor and their imports.
    "TQDM_*",
    "AOT_*",
    "AOTINDUCTOR_*",
    "INDUCTOR_*",
    "PARTITIONER_*",
    "PT2_*",
    "COMPILE_STROBELIGHT_*",
    "CUTEDSL_*",
    "CUTLASS_*",
    "ENABLE_*",
    "DUMP_AOTI_MINIFIER",
    "FAKE_ALLOW_META",
    "FX_*",
    "LOG_*",
    "UNSAFE_SKIP_FSDP_MODULE_GUARDS",
    "TRITON_*",
    "MPMATH_*",
    "SAGE_ROOT",
    "SYMPY_*",
    "NETWORKX_*",
    "_NETWORKX_*",
    "CI",
    "CXX",
    "HOME",
    "LNAME",
    "LOGNAME",
    "USER",
    "USERNAME",
    "TEMP",
    "TMP",
    "TMPDIR",
    "_PYTHON_*",
)
"""
Read by torch, numpy and their libraries when they are loaded, so not by a fork server that
preloads nothing.
"""
INTEL_OPENMP = ("KMP_*",)
"""Read by libiomp5 and libomp alone."""

READ_LATER = frozenset({CUDA_DEVICES_VARIABLE, "TORCH_NCCL_ASYNC_ERROR_HANDLING"})
"""
On the lists by their first letters, but read in the workers, when devices and process groups are
opened.
"""
OF_WORKERS = frozenset(
    {
        THREADS_VARIABLE,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_ERROR_FILE",
    }
)
"""Set by each launch, and applied by setters in the workers: they affect no fork server."""
PER_LAUNCH = READ_LATER | OF_WORKERS
"""Without effect unless `preload` names a module that may read them."""
NOISE = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "LINES", "COLUMNS", "PYTEST_CURRENT_TEST"})
"""Set again for each program, test or terminal."""
LOST_AFTER_IMPORT = (
    "GOMP_*",
    "KMP_*",
    "OMP_*",
    "OPENBLAS_*",
    "MKL_*",
    "PYTORCH_JIT*",
    "TORCH_LOGS*",
    "TORCH_TRACE",
    "TORCH_DTRACE",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_USE_RTLD_GLOBAL",
    "TORCH_COMPILE_*",
    "TORCHDYNAMO_*",
    "TORCHINDUCTOR_*",
)
"""
Variables without effect once torch is imported, so that a script which sets them first needs its
own import.
"""
READ_WHEN_USED = frozenset({"TORCHINDUCTOR_CACHE_DIR"})
"""Fits the list, but is looked up at each use."""


@dataclass(frozen=True)
class Reads:
    """Environment variables that a fork server has read."""

    names: frozenset[str]
    """Names looked up by Python's own start."""
    patterns: tuple[str, ...] = ()
    """Patterns of names that its imported modules read."""
    harmless: frozenset[str] = NOISE | PER_LAUNCH
    """Names that fit a pattern but were not read."""

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        # Without patterns nothing matches; an empty expression would match every name.
        return re.compile("|".join(map(fnmatch.translate, self.patterns)) or r"(?!)")

    @classmethod
    def of_message(cls, message: Mapping[str, Any], preload: Sequence[str]) -> Reads | None:
        """
        Read a fork server's report, with its *preload*; None if it cannot know all that it read.
        """
        if message.get("whole", True):
            # A message without the key is from another version of elasticlib, in another
            # interpreter.
            return None

        names = frozenset(message["names"])

        # A module that the user has named may have read any variable.
        if message["named"]:
            return cls(names, ("*",), NOISE | OF_WORKERS)

        libraries = (*LIBRARIES, *(INTEL_OPENMP if message["intel_openmp"] else ())) if preload else ()
        return cls(names, (*INTERPRETER, *libraries))

    def concern(self, name: str) -> bool:
        """Return True if another value of *name* could have made another fork server."""
        if name in NOISE:
            return False
        return name in self.names or (name not in self.harmless and self._pattern.match(name) is not None)


def serves(reads: Reads | None, given: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """
    Return True if a fork server that was started with the variables *given* can serve a launch
    with those *wanted*.

    Without *reads*, as before the imports are done, any variable may be among them.
    """
    changed = {name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name)}
    if reads is None:
        return changed <= NOISE | PER_LAUNCH
    return not any(map(reads.concern, changed))


def is_lost_after_import(name: str) -> bool:
    """Return True for a variable that a script must set before it imports torch."""
    return name not in PER_LAUNCH | READ_WHEN_USED and any(
        fnmatch.fnmatchcase(name, each) for each in LOST_AFTER_IMPORT
    )
