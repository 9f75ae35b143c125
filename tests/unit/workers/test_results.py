"""What a worker sends back: by name what both sides have in ``__main__``, by value all else."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import pytest

from elasticlib.workers._results import pack_result


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of ``__main__``."""
    kind = type("Point", (), {"__module__": "__main__", "side": "worker"})
    monkeypatch.setattr(sys.modules["__main__"], "Point", kind, raising=False)
    return kind


@pytest.fixture
def launchers_point(point: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the launcher has under the same name; asked for once the worker's side is packed."""
    kind = type("Point", (), {"__module__": "__main__", "side": "launcher"})

    def become_the_launcher() -> Any:
        monkeypatch.setattr(sys.modules["__main__"], "Point", kind)
        return kind

    return become_the_launcher


def test_a_class_that_both_sides_have_travels_by_name(point: Any, launchers_point: Any) -> None:
    packed = pack_result(point(), ["Point"])
    there = launchers_point()

    assert type(pickle.loads(packed)) is there


def test_a_forked_caller_has_all_that_its_workers_have(point: Any, launchers_point: Any) -> None:
    packed = pack_result(point, None)
    there = launchers_point()

    assert pickle.loads(packed) is there


def test_a_class_that_only_the_worker_has_travels_by_value(point: Any, launchers_point: Any) -> None:
    packed = pack_result(point(), ())
    there = launchers_point()

    found = pickle.loads(packed)
    assert type(found) is not there
    assert found.side == "worker"


def test_a_class_that_the_worker_defined_anew_travels_by_value(point: Any, launchers_point: Any) -> None:
    anew = type("Point", (), {"__module__": "__main__", "side": "anew"})

    packed = pack_result(anew(), ["Point"])
    launchers_point()

    assert pickle.loads(packed).side == "anew"


@pytest.mark.parametrize("value", [None, 1.5, "text", b"\0" * 100_000, {"a": [1, (2,)]}, range(3), print])
def test_plain_values_come_back_as_they_are(value: object) -> None:
    assert pickle.loads(pack_result(value, ())) == value


def test_what_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(TypeError, match="lock"):
        pack_result(threading.Lock(), ())
