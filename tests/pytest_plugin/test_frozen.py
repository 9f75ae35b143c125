"""A test that freezes the clock or patches what the launcher uses gets its results, and its deadlines hold."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

CODE = """
import builtins, json, os, sys, threading, time, types
from unittest import mock
import pytest, torch.distributed as dist
import elasticlib
from elasticlib import LaunchConfig, elastic_launch

FAKES = {
    time.monotonic: lambda: 1000.0,
    time.perf_counter: lambda: 1000.0,
    time.time: lambda: 1.7e9,
}

@pytest.fixture
def frozen(monkeypatch):
    # As freezegun does it: whatever is a function of the clock is replaced in each module but those of Python's waits.
    kept = ("threading", "queue", "multiprocessing", "_pytest", "pytest", "asyncio")
    changed = []
    for name, module in list(sys.modules.items()):
        if type(module) is types.ModuleType and name.partition(".")[0] not in kept:
            for attribute, value in list(vars(module).items()):
                if type(value) is types.BuiltinFunctionType and value in FAKES:
                    changed.append((module, attribute, value))
                    setattr(module, attribute, FAKES[value])
    yield
    for module, attribute, value in changed:
        setattr(module, attribute, value)

@pytest.fixture
def patched():
    # Started and stopped by hand, what is patched does not travel: the ranks have the real ones.
    with mock.patch("json.dumps", side_effect=ValueError), mock.patch("json.loads", side_effect=ValueError):
        yield

def double(value):
    return 2 * value

def fails_on_one(value):
    if int(os.environ["RANK"]) == 1:
        raise ValueError(value)
    threading.Event().wait()  # until the launcher stops it

def calls():
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, shutdown_timeout=0.5)
    assert elastic_launch(config, double)(3) == {0: 6, 1: 6}
    with pytest.raises(ValueError):
        elastic_launch(config, fails_on_one)(3)
    with elasticlib.pool(2) as pool:
        assert pool.run(double, 4) == {0: 8, 1: 8}
        with pytest.raises(ValueError):
            pool.run(fails_on_one, 1)
        assert pool.run(double, 5) == {0: 10, 1: 10}

def test_frozen(frozen): calls()

def test_frozen_ranks(frozen, elastic):
    assert elastic(double, 1) == {0: 2, 1: 2}
    with pytest.raises(TimeoutError, match="timeout of 1 s"):
        elastic(lambda: threading.Event().wait(), timeout=1)
    with pytest.raises(ValueError):
        elastic(fails_on_one, 1)
    assert elastic(double, 1) == {0: 2, 1: 2}

@pytest.mark.elastic(timeout=20)
def test_frozen_body(rank):
    with mock.patch("time.monotonic", lambda: 0.0), mock.patch("time.time", lambda: 0.0):
        dist.barrier()

def test_patched(patched): calls()

def test_patched_ranks(patched, elastic):
    assert elastic(double, 1) == {0: 2, 1: 2}

def test_sleepless(monkeypatch, elastic):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    calls()
    assert elastic(double, 1) == {0: 2, 1: 2}
"""


def test_a_frozen_clock_or_patched_json_hangs_nothing(run: Run) -> None:
    result = run(CODE, "-v", "-p", "no:randomly", "--timeout=100", plugins=("pytest_timeout",))

    result.assert_outcomes(passed=6)
