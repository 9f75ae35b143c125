"""Options of NUMA binding: the four modes by member or by name, and torch's own class."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib import LaunchConfig, WorkerSpec
from elasticlib.errors import ConfigError
from elasticlib.numa import AffinityMode, BindingError, NumaOptions, as_numa_options


def test_the_modes_have_torchs_names_and_texts() -> None:
    texts = {"NODE": "node", "SOCKET": "socket", "EXCLUSIVE": "exclusive", "CORE_COMPLEX": "core-complex"}

    assert texts == {mode.name: mode.value for mode in AffinityMode}


def test_options_are_a_frozen_data_class_with_torchs_fields() -> None:
    options = NumaOptions(AffinityMode.NODE)

    assert {"affinity_mode": AffinityMode.NODE, "should_fall_back_if_binding_fails": False} == dataclasses.asdict(
        options
    )
    assert options == pickle.loads(pickle.dumps(options))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.affinity_mode = AffinityMode.SOCKET  # type: ignore[misc]


def test_a_mode_may_be_given_by_its_name() -> None:
    mode: Any = "core-complex"

    assert NumaOptions(mode).affinity_mode is AffinityMode.CORE_COMPLEX


@pytest.mark.parametrize("mode", ["nodes", "", None, 3])
def test_an_unknown_mode_is_refused_with_the_known_ones(mode: Any) -> None:
    with pytest.raises(
        ValueError, match=r"affinity_mode=.* unknown: give one of node, socket, exclusive, core-complex"
    ):
        NumaOptions(mode)


def test_any_true_value_turns_fallback_on_as_in_torch() -> None:
    assert NumaOptions(AffinityMode.NODE, 1).should_fall_back_if_binding_fails is True  # type: ignore[arg-type]


def test_options_of_torchs_own_class_are_understood() -> None:
    torchs = SimpleNamespace(affinity_mode=SimpleNamespace(value="socket"), should_fall_back_if_binding_fails=True)

    assert NumaOptions(AffinityMode.SOCKET, True) == as_numa_options(torchs)


@pytest.mark.parametrize("value", ["node", 1, object()])
def test_invalid_numa_options_are_refused_by_launch_and_spec(value: Any) -> None:
    with pytest.raises(ValueError, match=r"numa_options=.* must be a NumaOptions, such as NumaOptions\(AffinityMode"):
        LaunchConfig(numa_options=value)
    with pytest.raises(ConfigError, match="numa_options="):
        WorkerSpec("trainer", 1, None, entrypoint=print, numa_options=value)
    with pytest.raises(ConfigError, match="numa_options="):
        LaunchConfig().numa_options = value


def test_the_error_of_a_binding_travels() -> None:
    error = pickle.loads(pickle.dumps(BindingError("no CPUs")))

    assert ("no CPUs", True) == (str(error), isinstance(error, RuntimeError))
