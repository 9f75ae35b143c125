"""Replace a name of the package for one test, wherever it was imported."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


def replace_everywhere(patch: pytest.MonkeyPatch, module: ModuleType, name: str, value: Any) -> None:
    """Set *name* of *module* to *value*, and in each module of the package that has imported that very object."""
    original = getattr(module, name)
    patch.setattr(module, name, value)
    for each in [found for key, found in sys.modules.items() if key.startswith("elasticlib")]:
        if vars(each).get(name) is original:
            patch.setattr(each, name, value)
