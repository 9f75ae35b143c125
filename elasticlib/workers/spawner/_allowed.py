"""
What a fork server may import for everybody: torch, its parts that an optimizer or a compiled model imports, and numpy.

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

_PACKAGES = frozenset({"torch", "torchgen", "functorch", "numpy", "triton"}) | sys.stdlib_module_names


def is_allowed(module: str) -> bool:
    """True for a module of Python, torch, numpy or triton."""
    return module.partition(".")[0] in _PACKAGES
