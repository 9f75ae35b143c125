"""Number of workers for a word, such as ``gpu``."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib.errors import SpecError, StartError
from elasticlib.numa import AffinityMode, NumaOptions
from elasticlib.workers import _devices


@pytest.mark.parametrize(
    ("requested", "found", "workers"),
    [(3, (0, ""), 3), ("gpu", (2, "cuda"), 2), ("xpu", (4, "xpu"), 4), ("npu", (8, "npu"), 8), ("auto", (8, "npu"), 8)],
)
def test_text_means_the_number_of_devices_of_that_name(
    monkeypatch: pytest.MonkeyPatch, requested: int | str, found: tuple[int, str], workers: int
) -> None:
    monkeypatch.setattr(_devices, "_accelerators", lambda *_: found)

    assert workers == _devices.workers_per_node(requested)


@pytest.mark.parametrize(
    ("requested", "found"), [("gpu", (0, "")), ("gpu", (2, "xpu")), ("npu", (2, "cuda")), ("foo", (0, ""))]
)
def test_device_name_without_devices_is_refused_with_what_is_here(
    monkeypatch: pytest.MonkeyPatch, requested: str, found: tuple[int, str]
) -> None:
    monkeypatch.setattr(_devices, "_accelerators", lambda *_: found)

    with pytest.raises(SpecError, match=f"nproc_per_node='{requested}', but torch finds .*give a number"):
        _devices.workers_per_node(requested)


NODE = NumaOptions(AffinityMode.NODE, True)


def torch_with(default: object) -> Any:
    """A torch whose build binds workers by *default*."""
    return SimpleNamespace(_utils_internal=SimpleNamespace(get_default_numa_options=lambda: default))


@pytest.mark.parametrize(("count", "expected"), [(2, NODE), (4, None), (0, None)])
def test_torchs_default_binding_holds_where_each_worker_has_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: NumaOptions | None
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(NODE))
    monkeypatch.setattr(_devices, "_accelerators", lambda *_: (count, "xpu"))

    assert expected == _devices.default_numa_options(2)


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), torch_with(None)])
def test_without_a_default_of_torch_no_device_is_counted(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(_devices, "_accelerators", None)

    assert _devices.default_numa_options(2) is None


@pytest.mark.parametrize("error", [RuntimeError("driver"), StartError("torch failed")])
def test_devices_that_cannot_be_counted_bind_nobody(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def count(*_: object) -> tuple[int, str]:
        raise error

    monkeypatch.setitem(sys.modules, "torch", torch_with(NODE))
    monkeypatch.setattr(_devices, "_accelerators", count)

    assert _devices.default_numa_options(2) is None
