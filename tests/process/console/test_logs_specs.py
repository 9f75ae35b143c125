"""Log specifications that were written for torch's launcher, under ours: unchanged, with torch's own classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]

PLUG_IN = """
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

class Theirs(DefaultLogsSpecs):
    def reify(self, envs):
        for env in envs.values():
            env["OF_THE_PLUG_IN"] = env["RANK"] + "/" + env["WORLD_SIZE"]
        return super().reify(envs)
"""

WORKER = """
import os, sys, time
rank, attempt, file = (os.environ[name] for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"))
os.write(1, f"out {os.environ['OF_THE_PLUG_IN']}\\n".encode())
os.write(2, f"err {rank} {file!r}\\n".encode())
if rank == "0":
    open("rank 0 has written", "w").close()
elif attempt == "0":
    while not os.path.exists("rank 0 has written"):
        time.sleep(0.01)
    sys.exit(1)
"""

PROGRAM = """
import sys

from elasticlib.run import main

if __name__ == "__main__":
    plug_in = ["--preload=", "--logs-specs=theirs", "--tee=1", "--redirects=1:3"]
    words = ["--local-ranks-filter=0", "--duplicate-stdout-filters=0/2"]
    main([*plug_in, *words, "--log-dir=logs", "--nproc-per-node=2", "--max-restarts=1", "worker.py"])
    main([*plug_in, "--log-dir=/dev/null", "worker.py"])
    sys.argv[1:] = [*plug_in, "--log-dir=/dev/null", *words, "worker.py"]
    main()
"""


def test_a_plug_in_that_builds_on_torchs_class_works_as_it_is(tmp_path: Path) -> None:
    """With files and a restart, then with the null device, then with a request that this cannot fulfil."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\ntheirs = theirs:Theirs\n")
    for name, code in {"theirs": PLUG_IN, "worker": WORKER, "program": PROGRAM}.items():
        (tmp_path / f"{name}.py").write_text(code)

    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ["[default0]:out 0/2"] * 2 + ["out 0/1"] == done.stdout.splitlines(), done.stderr
    (folder,) = tmp_path.glob("logs/*")
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    for attempt in ("attempt_0", "attempt_1"):
        assert "[default0]:out 0/2\n" == texts[f"{attempt}/filtered_stdout.log"]
        assert "out 0/2\n" == texts[f"{attempt}/0/stdout.log"]
        assert "out 1/2\n" == texts[f"{attempt}/1/stdout.log"]
        assert f"{attempt}/1/error.json'\n" in texts[f"{attempt}/1/stderr.log"]
        assert f"{attempt}/0/stderr.log" not in texts
    assert 1 == done.stderr.count("err 0 ''")
    assert 2 == done.returncode
    assert "--duplicate-stdout-filters=['0/2'] needs a file for the filtered lines" in done.stderr
