"""`reachable`: the address of a node whose name does not resolve."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticlib.engines import reachable

NAME = "node.invalid"
"""A name that no resolver knows (RFC 6761)."""


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make *script* the ``scontrol`` of this process."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_name_that_resolves_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, "echo NodeName=localhost NodeAddr=10.0.0.9")

    assert "localhost:20001" == reachable("localhost:20001")


def test_slurm_knows_the_address_of_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, f'[ "$4" = {NAME} ] && echo "NodeName=$4 NodeAddr=10.0.0.9 NodeHostName=$4"')

    assert "10.0.0.9:20001" == reachable(f"{NAME}:20001")


@pytest.mark.parametrize("script", ["exit 1", "echo what", f"echo NodeAddr={NAME}", "printf '\\377'"])
def test_without_an_answer_the_name_stays(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, script)

    assert f"{NAME}:20001" == reachable(f"{NAME}:20001")


def test_without_slurms_programs_the_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert f"{NAME}:20001" == reachable(f"{NAME}:20001")
