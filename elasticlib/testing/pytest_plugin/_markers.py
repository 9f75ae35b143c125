"""
Options of a session's tests: settings, markers of test items, and arguments that only ranks have.

Rules of this file: an invalid option is an error of the collection if it can be found there, else
of the test's setup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elasticlib.testing._case import known_backends
from elasticlib.testing.ranks import _rank_options
from elasticlib.testing.ranks._rank_options import MarkError, RankOptions

_SIZE = "world_size"
_DEFAULTS = pytest.StashKey[RankOptions]()


def defaults(config: pytest.Config) -> RankOptions:
    """Return the options in pytest's settings. Raises ``pytest.UsageError`` if they are invalid."""
    if _DEFAULTS not in config.stash:
        try:
            found: dict[str, Any] = {"backend": config.getini("elastic_backend")}
            for name, kind in (("nproc", int), ("timeout", float)):
                text = config.getini(f"elastic_{name}")
                try:
                    found[name] = kind(text)
                except ValueError:
                    raise MarkError(f"elastic_{name} = {text}: it must be a number") from None

            group = config.getini("elastic_group")
            found["group"] = None if str(group).lower() == "none" else group
            config.stash[_DEFAULTS] = _rank_options.checked_options(
                "settings elastic_* of pytest", RankOptions(), found, known_backends()
            )
        except MarkError as error:
            raise pytest.UsageError(str(error)) from None

    return config.stash[_DEFAULTS]


def _options(item: Any) -> dict[str, Any]:
    """Return the options of all markers of *item*; the nearest marker takes precedence."""
    found: dict[str, Any] = {}
    for marker in reversed(list(item.iter_markers("elastic"))):
        found |= marker.kwargs
    return found


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make a test for each number of ranks in the marker. Raises ``CollectError``."""
    item = metafunc.definition
    where = f"elastic marker of {item.nodeid}"
    try:
        options = _options(item)
        marker = item.get_closest_marker("elastic")
        sizes = _rank_options.sizes(where, options.get("nproc", defaults(metafunc.config).nproc))
        one = {**options, "nproc": sizes[0]}
        _rank_options.checked_options(
            where, defaults(metafunc.config), one, known_backends(), marker.args if marker else ()
        )
    except MarkError as error:
        raise pytest.Collector.CollectError(str(error)) from None

    # A list of one number counts as well, so that the id of the test names it.
    if len(sizes) > 1 or isinstance(options.get("nproc"), Sequence):
        if _SIZE not in metafunc.fixturenames:
            metafunc.fixturenames.append(_SIZE)
        metafunc.parametrize(_SIZE, sizes, indirect=True, ids=[f"nproc={size}" for size in sizes])


def wanted_by(item: Any) -> RankOptions:
    options = _options(item)
    size = getattr(getattr(item, "callspec", None), "params", {}).get(_SIZE)
    sizes = _rank_options.sizes(item.nodeid, options.get("nproc", defaults(item.config).nproc))
    if len(sizes) > 1 and not isinstance(size, int) and runs_on_ranks(item):
        raise MarkError(
            f"elastic marker of {item.nodeid}: nproc={options['nproc']!r} has several numbers, which a marker that is "
            "added after collection cannot have: give one number, or add the marker earlier"
        )

    options["nproc"] = size if isinstance(size, int) else sizes[0]
    return _rank_options.checked_options(
        f"elastic marker of {item.nodeid}", defaults(item.config), options, known_backends()
    )


def runs_on_ranks(item: Any) -> bool:
    """Return whether the body of *item* runs on ranks: marked, and without ``elastic``."""
    own = getattr(getattr(item, "_fixtureinfo", None), "argnames", ())
    return item.get_closest_marker("elastic") is not None and "elastic" not in own


def world_size(request: pytest.FixtureRequest) -> int:
    """Return the value of the fixture ``world_size``."""
    return int(getattr(request, "param", 0)) or wanted_by(request.node).nproc


def case_of(item: Any) -> Any:
    """Return the `ElasticTestCase` class of *item*; None if it belongs to another class or none."""
    kind = getattr(item, "cls", None)
    return kind if getattr(kind, "runs_on_ranks", False) else None


_WRAPPERS = ("pytest_asyncio", "_pytest.debugging")
"""Modules that replace a test's function by a wrapper for pytest's process."""


def written(function: Any) -> Any:
    """Return a test's original function, without the wrappers of other plugins."""
    while hasattr(function, "__wrapped__"):
        made_in = getattr(function, "__globals__", {}).get("__name__", "")
        if made_in.partition(".")[0] not in _WRAPPERS and made_in not in _WRAPPERS:
            break
        function = function.__wrapped__
    return function


class Made:
    """Placeholder for an argument that each rank makes."""

    def __init__(self, name: str, test: str) -> None:
        self.name, self.test = name, test

    def __repr__(self) -> str:
        return f"<{self.name}, made by each rank>"


def made_in_ranks(request: pytest.FixtureRequest, name: str) -> Made:
    """
    Return the placeholder of a fixture that has a value only in ranks.

    Raises ``pytest.UsageError`` unless the test's own function takes the fixture.
    """
    item = request.node
    if not runs_on_ranks(item):
        raise pytest.UsageError(
            f"fixture {name!r} of {item.nodeid} exists only on a rank: mark the test with "
            "@pytest.mark.elastic(nproc=2), so that its body runs on each rank, or use torch.distributed "
            "in the function that elastic(...) calls"
        )

    if name not in getattr(item._fixtureinfo, "argnames", ()):
        raise pytest.UsageError(
            f"a fixture of {item.nodeid} uses the fixture {name!r}, which exists only on ranks, but other fixtures run "
            f"once, in pytest's process: take {name!r} as an argument of the test function instead"
        )

    return Made(name, item.nodeid)
