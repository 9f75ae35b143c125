"""How many workers a word means."""

from __future__ import annotations

import pytest

from elasticlib.errors import SpecError
from elasticlib.workers import _devices


@pytest.mark.parametrize(
    ("asked", "found", "workers"),
    [(3, (0, ""), 3), ("gpu", (2, "cuda"), 2), ("xpu", (4, "xpu"), 4), ("npu", (8, "npu"), 8), ("auto", (8, "npu"), 8)],
)
def test_a_word_means_the_devices_of_that_name(
    monkeypatch: pytest.MonkeyPatch, asked: int | str, found: tuple[int, str], workers: int
) -> None:
    monkeypatch.setattr(_devices, "_accelerators", lambda *_: found)

    assert workers == _devices.workers_per_node(asked)


@pytest.mark.parametrize(
    ("asked", "found"), [("gpu", (0, "")), ("gpu", (2, "xpu")), ("npu", (2, "cuda")), ("foo", (0, ""))]
)
def test_a_word_without_devices_is_refused_by_name_with_what_is_here(
    monkeypatch: pytest.MonkeyPatch, asked: str, found: tuple[int, str]
) -> None:
    monkeypatch.setattr(_devices, "_accelerators", lambda *_: found)

    with pytest.raises(SpecError, match=f"nproc_per_node='{asked}', but torch finds .*give a number"):
        _devices.workers_per_node(asked)
