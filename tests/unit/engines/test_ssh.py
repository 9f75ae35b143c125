"""The placement of agents over SSH, with another program in the place of ssh."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from elasticlib import StartError
from elasticlib.engines import AgentCommand, Ssh
from tests.process.launches import children


def test_without_a_thread_for_the_agents_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> threading.Thread:
        raise StartError("can't start new thread")

    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 600\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("elasticlib.engines._ssh.start_thread", refuse)
    before = children(os.getpid())

    with pytest.raises(StartError, match="can't start new thread"):
        Ssh(["h1", "h2"]).place(2, AgentCommand(("-m", "agent"), b""))
    assert before == children(os.getpid())
