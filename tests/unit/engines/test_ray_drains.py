"""Ray without its own interface for nodes that drain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elasticlib.engines import _ray_placement


@pytest.mark.parametrize(
    ("module", "is_shown"),
    [
        (SimpleNamespace(state=SimpleNamespace(get_draining_nodes=dict)), True),
        (SimpleNamespace(state=SimpleNamespace()), False),
        (SimpleNamespace(), False),
    ],
)
def test_drains_are_shown_if_ray_has_its_own_interface(
    monkeypatch: pytest.MonkeyPatch, module: object, is_shown: bool
) -> None:
    monkeypatch.setattr(_ray_placement, "ray_module", lambda name: module)

    assert is_shown == _ray_placement.shows_drains()


def test_drains_are_not_shown_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(_ray_placement, "ray_module", missing)

    assert not _ray_placement.shows_drains()
