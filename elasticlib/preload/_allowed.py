"""
Modules that a fork server may import for every program: torch, the parts of it that an optimizer
or a compiled model imports, numpy, and the reader of functions that are sent by value.

Rules of this file: a name is here only if the likeness table shows that a program cannot see the
difference from its own import. Everything else is imported ahead only by name
(`preload=("transformers",)`). PURE.
"""

from __future__ import annotations

import sys

TORCH = "torch"
NUMPY = "numpy"
OPTIMIZER = "torch._dynamo"
"""Imported by the first optimizer, learning rate scheduler or DistributedDataParallel that a program makes."""
COMPILER = "torch._inductor.compile_fx"
"""Imported when a compiled model is first called."""
KERNELS = "triton"
"""Imported by compilers for GPUs, where it is installed."""

BY_VALUE = "cloudpickle"
"""Imported by each worker that gets a function by value."""
DEPENDENCIES = frozenset(
    "numpy filelock typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec packaging psutil yaml".split()
)
"""Packages that these import, here or in other versions, where they are installed."""

_PACKAGES = frozenset({"torch", "torchgen", "functorch", "numpy", "triton", "cloudpickle"}) | sys.stdlib_module_names


def is_allowed(module: str) -> bool:
    """Return True for a module of Python, torch, numpy, triton or cloudpickle."""
    return module.partition(".")[0] in _PACKAGES
