"""
What a fork server may import for everybody: torch, its parts that an optimizer or a compiled model imports, numpy, and
what reads functions that come by value.

Rules of this file: a name is here because the likeness table shows that a program does not tell it from an import of
its own; everything else is imported ahead only by name (`preload=("transformers",)`). PURE.
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
"""Imported by what compiles for GPUs, where it is installed."""

BY_VALUE = "cloudpickle"
"""Imported by each worker that gets a function by value."""
BROUGHT = frozenset(
    "numpy filelock typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec packaging psutil yaml".split()
)
"""Packages of others that these import, here or elsewhere, where they are installed."""

_PACKAGES = frozenset({"torch", "torchgen", "functorch", "numpy", "triton", "cloudpickle"}) | sys.stdlib_module_names


def is_allowed(module: str) -> bool:
    """True for a module of Python, torch, numpy, triton or cloudpickle."""
    return module.partition(".")[0] in _PACKAGES
