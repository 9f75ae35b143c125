"""The file of the page *SSH* trains on two machines, with a program in place of ssh that enters them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import elasticlib
from tests.docs.test_kubernetes import TRAIN
from tests.hosts._netns import machines, missing
from tests.process.launches import environment

pytestmark = pytest.mark.slow

PAGE = Path(elasticlib.__file__).parent / "docs" / "ssh.md"
LIMIT = 120.0


def test_file_of_the_page_trains_on_two_machines(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    (tmp_path / "train.py").write_text(TRAIN)
    [script] = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)

    with machines(2) as hosts:
        names = " ".join(host.name for host in hosts)
        (tmp_path / "launch.sh").write_text(script.replace("hosts=(node0 node1)", f"hosts=({names})"))
        cases = [f'{host.name}) exec {shlex.join(host.entered("sh", "-c"))} "$5" ;;' for host in hosts]
        ssh = tmp_path / "ssh"
        ssh.write_text("\n".join(["#!/bin/sh", 'case "$4" in', *cases, "esac", ""]))
        ssh.chmod(0o755)
        path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "launch.sh"],
            cwd=tmp_path,
            env=environment(PATH=path, OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    assert done.returncode == 0, done.stdout + done.stderr
    assert {"0", "1"} == set(re.findall(r"node (\d) trained with", done.stdout)), done.stdout + done.stderr
