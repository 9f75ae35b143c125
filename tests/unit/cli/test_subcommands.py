"""Which command lines run a subcommand, and which a script."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

import elasticlib.run
from elasticlib.cli import SUBCOMMANDS, subcommand
from elasticlib.cli._serve import parser


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "args", [[], ["train.py"], ["./serve"], ["--nnodes", "1", "serve"], ["-m", "serve"], ["Serve"]]
)
def test_other_command_lines_are_launches(args: Sequence[str]) -> None:
    assert subcommand(args) is None


def test_script_of_that_name_wins(folder: Path) -> None:
    assert subcommand(["serve"]) is not None

    (folder / "serve").touch()

    assert subcommand(["serve"]) is None


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_subcommand_gets_the_arguments_after_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Sequence[str]] = []
    fake = types.ModuleType("fake")
    fake.main = got.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, SUBCOMMANDS[name], fake)

    elasticlib.run.main([name, "--port", "0"])

    assert [["--port", "0"]] == got


def test_wrong_usage_of_serve_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        elasticlib.run.main(["serve", "--port", "high"])

    assert "elasticrun serve: error: argument --port" in capsys.readouterr().err


def test_defaults_of_serve_are_those_of_its_settings() -> None:
    assert {"port": 29400, "host": "", "max_jobs": 64} == vars(parser().parse_args([]))
