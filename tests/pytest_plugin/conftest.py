"""Sessions of pytest whose tests run on ranks, each in a program of its own."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.slow
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest over a file with this code; its plugins are this one and those that are named."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(os.path.dirname(__file__))))

    def run(code: str, *args: str, plugins: tuple[str, ...] = (), **files: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=code, **files)
        names = [part for name in ("elasticlib.testing.pytest_plugin", *plugins) for part in ("-p", name)]
        return pytester.runpytest_subprocess(*names, *args)

    return run
