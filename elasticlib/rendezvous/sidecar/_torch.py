"""
torch's stores without the rest of torch, for processes that need nothing else of it.

``import torch`` loads a library of C++ and a thousand modules of Python; the stores are in the
library. So the library alone is loaded here, into a package ``torch`` that has nothing else.

Rules of this file: only for programs of elasticlib, in which no user code runs. It only replaces
versions of torch with which that was tried; of any other version all is imported.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

_TRIED = re.compile(r"2\.(13|15)\.\d+(\+[\w.]+)?")
"""Tested releases, of any build."""
_VERSION = re.compile(r"""^__version__\s*(?::[^=]*)?=\s*["']([^"']+)""", re.MULTILINE)
_PACKAGES = ("torch", "torch.distributed")


def import_stores() -> bool:
    """
    Make ``from torch.distributed import TCPStore, FileStore, DistStoreError`` quick; return whether
    that worked.
    """
    # A program that has torch already has its stores, too.
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or not _TRIED.fullmatch(_version(spec)):
        return False

    # With bare packages in place, `import torch._C` loads the library, and runs nothing else of torch.
    package, distributed = (types.ModuleType(name) for name in _PACKAGES)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules.update(zip(_PACKAGES, (package, distributed), strict=True))
    try:
        import torch._C
    # Some builds find their libraries only after preparations that `import torch` makes.
    except (ImportError, OSError):
        for name in _PACKAGES:
            del sys.modules[name]
        return False

    library = torch._C
    package.distributed = distributed  # type: ignore[attr-defined]

    # This asks for the package that it belongs to.
    library._c10d_init()
    stores = sys.modules["torch._C._distributed_c10d"]
    for name in ("Store", "TCPStore", "FileStore", "PrefixStore"):
        setattr(distributed, name, getattr(stores, name))
    distributed.DistStoreError = library._DistStoreError  # type: ignore[attr-defined]
    return True


def _version(spec: ModuleSpec) -> str:
    """Return the version in the package's file; empty if it has none."""
    try:
        # The file is read and not run: importing it would import torch.
        text = Path(spec.origin or "").with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeError, ValueError):
        return ""
    found = _VERSION.search(text)
    return found[1] if found else ""
