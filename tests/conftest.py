"""
What all tests share: Hypothesis profiles, the rule for accelerators, and no silent skips in CI.

`HYPOTHESIS_PROFILE` chooses between dev (50 examples), ci (300) and nightly (5000). Of a test that is marked as sampled
one variant runs in CI, chosen by the seed `ELASTICLIB_SAMPLE` (0); elsewhere, or with ``all``, all do.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

IN_CI = os.environ.get("CI") == "true"
SAMPLE = os.environ.get("ELASTICLIB_SAMPLE", "0" if IN_CI else "all")
HAS_ACCELERATOR = pathlib.Path("/dev/nvidiactl").exists()

for _name, _examples in {"dev": 50, "ci": 300, "nightly": 5000}.items():
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


def pytest_configure() -> None:
    # A shell's background job starts with these ignored, and launches respect that: here they are under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_ACCELERATOR:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA device (/dev/nvidiactl) on this machine"))
    if SAMPLE != "all":
        _sample(config, items)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    # Each test draws for itself: another test more or less changes nothing for the others.
    chosen = {random.Random(f"{SAMPLE}/{name}").choice(found) for name, found in variants.items()}
    left_out = {item for found in variants.values() for item in found} - chosen
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where nothing may be missing: {report.longrepr}"
    return report
