"""
Shared setup of all tests: Hypothesis profiles, the rule for accelerators, no silent skips in CI.

`HYPOTHESIS_PROFILE` selects ci (10 examples, always the same), dev (50) or nightly (5000). A share
of the tests marked as sampled runs: one variant of each, drawn by the seed `ELASTICLIB_SAMPLE` (0).
All of them run with ``--whole``, or if files or tests are named
(``pytest tests/process/console/test_tee.py``, ``pytest -k tee``).
"""

from __future__ import annotations

import math
import os
import pathlib
import random
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# Every connection of a TCPStore asks for the name of its peer: where no name server answers, one in thirty takes 5 s.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

IN_CI = os.environ.get("CI") == "true"
SAMPLE = os.environ.get("ELASTICLIB_SAMPLE", "0")
PACE = 0.32
"""Of the share that a file's marker names: what two cores do in less than twelve minutes, with all else."""
HAS_ACCELERATOR = pathlib.Path("/dev/nvidiactl").exists()

for _name, _examples in {"ci": 10, "dev": 50, "nightly": 5000}.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        derandomize=_name == "ci",
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run all tests, not only a sample of the long ones")


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
    if not config.getoption("whole") and not _named(config):
        _sample(config, items)


def _named(config: pytest.Config) -> bool:
    """Return whether the user selected tests: a file or a keyword counts, a folder does not."""
    places = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return bool(config.getoption("keyword")) or not all(place.is_dir() for place in places)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    One variant of each sampled test, and of these the share that the marker names.

    A file's marker means that share of its tests, at the pace above, on average over the seeds; a class's or a test's
    own marker the part of all seeds with which this one runs.
    """
    files: dict[pathlib.Path, dict[str, list[pytest.Item]]] = {}
    shares: dict[pathlib.Path, float] = {}
    drawn: dict[str, list[pytest.Item]] = {}
    """The variants of each test that is to run."""
    for item in items:
        node, marker = next(item.iter_markers_with_node("sampled"), (item, None))
        if marker is None:
            continue
        name, share = item.nodeid.partition("[")[0], marker.args[0] if marker.args else 1.0
        if isinstance(node, pytest.Module):
            files.setdefault(item.path, {}).setdefault(name, []).append(item)
            shares[item.path] = share
        elif _draw(name if node is item else node.nodeid) < share:
            drawn.setdefault(name, []).append(item)
    for path, tests in files.items():
        # Each draws for itself: another test more or less changes little for the others.
        share = shares[path] if shares[path] == 1.0 else shares[path] * PACE
        count = math.floor(share * len(tests) + _draw(path.name))
        kept = sorted(tests, key=_draw)[:count]
        drawn |= {name: tests[name] for name in kept}
    chosen = {random.Random(f"{SAMPLE}/{name}/variant").choice(found) for name, found in drawn.items()}
    left_out = {item for item in items if item.get_closest_marker("sampled")} - chosen
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _draw(name: str) -> float:
    return random.Random(f"{SAMPLE}/{name}").random()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where nothing may be missing: {report.longrepr}"
    return report
