"""
A pytest plugin for tests whose body runs on every rank of a process group, on warm workers.

    @pytest.mark.elastic(nproc=[1, 2, 4], timeout=30)
    def test_mean(rank, world_size, group): ...

    def test_resume(elastic, tmp_path):
        assert elastic(train, tmp_path, nproc=2) == {0: 0.5, 1: 0.5}

Pytest finds it by its entry point.

Rules of this package: it imports nothing but this file until a test asks for ranks. `rank` has the
code that runs in ranks; all other code runs in pytest's process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

_MARKER = (
    "elastic(nproc=2, backend='gloo', timeout=60, group='fresh', device='cpu'): run the test's body on "
    "each of nproc ranks (elasticlib); a list of numbers makes one test for each. The settings elastic_* "
    "give the defaults"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings and options."""
    group = parser.getgroup("elastic", "tests on several ranks (elasticlib)")
    group.addoption("--elastic-reverse", action="store_true", help="run all tests in the reverse order")
    parser.addini("elastic_nproc", "default number of ranks of a test (2)", default="2")
    parser.addini("elastic_backend", "backend of tests' process groups (gloo)", default="gloo")
    parser.addini("elastic_timeout", "time limit of a test on ranks, in seconds (60)", default="60")
    parser.addini("elastic_group", "process group of tests: fresh, shared or none (fresh)", default="fresh")
    parser.addini("elastic_checks", "check whether tests leak state into their ranks (true)", type="bool", default=True)


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker ``elastic``."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each number of ranks in its marker."""
    if metafunc.definition.get_closest_marker("elastic") is not None:
        from elasticlib.testing.pytest_plugin import _markers

        _markers.parametrize(metafunc)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reverse the order with ``--elastic-reverse``; register the plugin if tests need ranks."""
    if config.getoption("elastic_reverse"):
        items.reverse()
    if any(_is_ours(item) for item in items) and not config.pluginmanager.has_plugin("elasticlib-ranks"):
        _register(config)


def _register(config: pytest.Config) -> Any:
    from elasticlib.testing.pytest_plugin import _plugin

    plugin = _plugin.Plugin(config)
    config.pluginmanager.register(plugin, "elasticlib-ranks")
    return plugin


def _is_ours(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    is_case = getattr(getattr(item, "cls", None), "runs_on_ranks", False)
    return is_case or item.get_closest_marker("elastic") is not None or "elastic" in names


@pytest.fixture(scope="session")
def elastic(request: pytest.FixtureRequest) -> Any:
    """
    Call a function on ranks: ``elastic(function, *args, nproc=2, **kwargs)`` returns {rank: result}.

    ``backend``, ``timeout``, ``group`` and ``device`` are the options of the marker ``elastic``. If
    the test has the marker, its values are the defaults. A test that takes this fixture runs in
    pytest's process. ``elastic.pool`` is the warm `elasticlib.Pool` with the default number of
    ranks. Raises `RanksFailed`, which is also an instance of the root cause's class.
    """
    plugin: Any = request.config.pluginmanager.get_plugin("elasticlib-ranks")
    # A test may use only ``request.getfixturevalue``, which no hook sees.
    if plugin is None:
        plugin = _register(request.config)
        plugin.begin(getattr(request, "_pyfuncitem", None))
    return plugin.fixture


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks of the test."""
    from elasticlib.testing.pytest_plugin import _markers

    return _markers.world_size(request)


def _of_ranks(name: str, what: str) -> Any:
    def made(request: pytest.FixtureRequest) -> Iterator[Any]:
        from elasticlib.testing.pytest_plugin import _markers

        yield _markers.made_in_ranks(request, name)

    made.__doc__ = what
    return pytest.fixture(made, name=name)


# Private names, because importing the package `rank` sets an attribute of that name here.
_rank = _of_ranks("rank", "The rank on which the body of a test marked ``elastic`` runs.")
_device = _of_ranks("device", "The ``torch.device`` of the rank: its GPU, or the CPU.")
_group = _of_ranks("group", "The process group of the test's ranks; None with ``group=None``.")
