"""
Which environment variables a fork server depends on, so that a launch with other values needs another one.

Variables as such go to the workers, launch by launch. Only what was read while the fork server came to be is part of
it: what Python code looked up during the imports was observed (`_observer`), what native code reads when it is
loaded stands in the lists below, which a test holds against the calls of ``getenv`` that an import makes.
PURE: two environments and what was read in, a verdict out.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from elasticlib.workers import _environment

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
    "TORCH_*",
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
    "TQDM_*",  # Python, but picked from a copy of the environment, which is no read
)
"""Read by torch, numpy and what they link when they are loaded, so not by a fork server that preloads nothing."""
INTEL_OPENMP = ("KMP_*",)
"""Read by libiomp5 and libomp alone."""

READ_LATER = frozenset({_environment.DEVICES, "TORCH_NCCL_ASYNC_ERROR_HANDLING"})
"""On the lists by their first letters, but read when devices and process groups are opened, in the workers."""
PER_LAUNCH = READ_LATER | {_environment.THREADS, "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE"}
"""Of no concern unless Python code read it: what each launch sets, and what workers apply by setters."""
NOISE = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "LINES", "COLUMNS", "PYTEST_CURRENT_TEST"})
"""Set anew for each program, test or terminal."""
_ANEW_EACH_TEST = "PYTEST_CURRENT_TEST"


@frozen
class Reads:
    """What a fork server read of its environment."""

    names: frozenset[str]
    """Looked up by Python code."""
    defaults: Mapping[str, str] = field(factory=dict)
    """Looked up first to be set where absent (``setdefault``), to these values."""
    patterns: tuple[str, ...] = ()
    """What native code reads."""
    _native: re.Pattern[str] = field(init=False, eq=False, repr=False)

    @_native.default
    def _compiled(self) -> re.Pattern[str]:
        return re.compile("|".join(map(fnmatch.translate, self.patterns)) or r"(?!)")

    @classmethod
    def told(cls, message: Mapping[str, Any], preload: Sequence[str]) -> Reads | None:
        """What a fork server with *preload* says of itself; None where it cannot know all that it read."""
        if message.get("whole", True):
            return None  # also one of another version, where another interpreter has that
        libraries = (*LIBRARIES, *(INTEL_OPENMP if message["intel_openmp"] else ())) if preload else ()
        return cls(frozenset(message["names"]), message["defaults"], (*INTERPRETER, *libraries))

    def concern(self, name: str, given: str | None, wanted: str | None) -> bool:
        """Whether another value of *name* could have made another fork server."""
        if name == _ANEW_EACH_TEST:
            return False
        if name in self.names:
            return True
        if name in self.defaults and not {given, wanted} <= {None, self.defaults[name]}:
            return True
        return name not in PER_LAUNCH and self._native.match(name) is not None


def serves(reads: Reads | None, given: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """
    Whether a fork server that was started with the variables *given* can serve a launch with those *wanted*.

    *reads* is None where they are not known, as before its imports are done: any variable may be among them.
    """
    changed = {name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name)}
    if reads is None:
        return changed <= NOISE | PER_LAUNCH
    return not any(reads.concern(name, given.get(name), wanted.get(name)) for name in changed)
