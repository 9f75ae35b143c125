"""Handlers from installed distributions: found by their entry points, harmless when broken."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous import RendezvousHandlerRegistry, RendezvousParameters
from elasticlib.rendezvous.handlers._registry import PLUGINS

MODULE = """
    class Handler:
        def __init__(self, params):
            self.params = params

        def get_backend(self):
            return "plugged"

    def get_creator():
        return Handler

    def breaks():
        raise LookupError("no licence found")
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """Put a distribution with these entry points on the path."""
    module = f"plug_{abs(hash(str(folder)))}"
    (folder / f"{module}.py").write_text(textwrap.dedent(MODULE))
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = (f"{name} = {value.format(module=module)}" for name, value in entries.items())
    (info / "entry_points.txt").write_text("\n".join([f"[{PLUGINS}]", *lines]))
    monkeypatch.syspath_prepend(str(folder))


def params(backend: str) -> RendezvousParameters:
    return RendezvousParameters(backend, "somewhere:1", "job", 1, 1)


def test_a_plug_in_is_called_without_arguments_and_returns_the_creator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, plugged="{module}:get_creator")
    wanted = params("plugged")

    handler = RendezvousHandlerRegistry(PLUGINS).create_handler(wanted)

    assert "Handler" == type(handler).__name__
    assert vars(handler)["params"] is wanted


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{module}:breaks", "LookupError: no licence found"),
        ("{module}:absent", "AttributeError"),
        ("no_such_module_anywhere:get_creator", "ModuleNotFoundError"),
        ("{module}:Handler", "TypeError"),
    ],
)
def test_a_broken_plug_in_costs_one_warning_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, reason: str
) -> None:
    install(tmp_path, monkeypatch, broken=value, plugged="{module}:get_creator")
    registry = RendezvousHandlerRegistry(PLUGINS)

    with caplog.at_level(logging.WARNING):
        registry.create_handler(params("plugged"))
        names = registry.names()

    warnings = [record.getMessage() for record in caplog.records]
    assert 1 == len(warnings)
    assert "'broken'" in warnings[0]
    assert reason in warnings[0]
    assert ("plugged",) == names


def test_a_plug_in_cannot_take_the_place_of_a_registered_creator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, mine="{module}:get_creator")
    registry = RendezvousHandlerRegistry(PLUGINS)

    def own(_: RendezvousParameters) -> None:
        raise ConfigError("the first creator was asked")

    registry.register("mine", own)  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING):
        registry.names()
    with pytest.raises(ConfigError, match="the first creator was asked"):
        registry.create_handler(params("mine"))
    assert "is already registered" in caplog.text


def test_plug_ins_are_not_looked_up_for_a_name_that_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, broken="{module}:breaks", plugged="{module}:get_creator")
    registry = RendezvousHandlerRegistry(PLUGINS)
    registry.register("c10d", lambda params: (_ for _ in ()).throw(ConfigError("asked")))

    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="asked"):
        registry.create_handler(params("c10d"))

    assert not caplog.records


def test_a_registry_of_its_own_knows_no_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, plugged="{module}:get_creator")

    assert () == RendezvousHandlerRegistry().names()
