"""A debugger that follows children, as an IDE starts it, stops at breakpoints in ranks, and in no helper of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from tests.process.callers.debug_client import debug

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

FUNCTION = """
import os, sys
from elasticlib import LaunchConfig, elastic_launch

def train(x):
    y = x + 1
    return y + int(os.environ["RANK"])  # here

if __name__ == "__main__":
    config = LaunchConfig(nproc_per_node=2, start_method=sys.argv[1])
    print(elastic_launch(config, train)(1))
"""
POOL = """
import os
import elasticlib

def train(x):
    return x + int(os.environ["RANK"])  # here

if __name__ == "__main__":
    with elasticlib.pool(2) as pool:
        print(pool.run(train, 1))
"""
SCRIPT = """
import os

def main():
    print("rank", os.environ["RANK"], flush=True)  # here

main()
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_debugger_stops_in_each_rank_of_a_function(method: str, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(FUNCTION)

    seen = debug(script, "# here", [str(script), method], tmp_path)

    assert 0 == seen.status, seen.stderr
    assert [("train", "0"), ("train", "1")] == sorted(seen.stops)
    assert "{0: 2, 1: 3}\n" == seen.stdout
    if method != "fork":  # of the caller itself, which forks what starts its workers
        assert 2 == len(seen.attached)


def test_debugger_stops_in_each_rank_of_a_pool(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(POOL)

    seen = debug(script, "# here", [str(script)], tmp_path)

    assert 0 == seen.status, seen.stderr
    assert [("train", "0"), ("train", "1")] == sorted(seen.stops)
    assert 2 == len(seen.attached)


@pytest.mark.parametrize("way", [["train.py"], ["-m", "train"], ["--no-python", "python", "train.py"]], ids=" ".join)
def test_debugger_stops_in_each_rank_of_a_script(way: list[str], tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT)

    seen = debug(script, "# here", ["-m", "elasticlib.run", "--nproc-per-node", "2", *way], tmp_path)

    assert 0 == seen.status, seen.stderr
    assert [("main", "0"), ("main", "1")] == sorted(seen.stops)
    assert ["rank 0", "rank 1"] == sorted(seen.stdout.splitlines())
    assert 2 == len(seen.attached)


def test_debugger_stops_in_each_rank_of_a_test(tmp_path: Path) -> None:
    """A look takes its time: the limit of the test does not count."""
    (script := tmp_path / "test_it.py").write_text(
        "import os, pytest\n\n@pytest.mark.elastic(nproc=2, timeout=0.1)\ndef test_ranks():\n"
        "    assert os.environ['WORLD_SIZE'] == '2'  # here\n"
    )

    seen = debug(script, "# here", ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"], tmp_path)

    assert 0 == seen.status, seen.stdout + seen.stderr
    assert [("test_ranks", "0"), ("test_ranks", "1")] == sorted(seen.stops)


ATTACH = {
    "initialize": {"adapterID": "python", "pathFormat": "path", "linesStartAt1": True, "columnsStartAt1": True},
    "attach": {"justMyCode": True},
    "configurationDone": {},
}
IN_A_CELL = """
import os, elasticlib
from elasticlib import LaunchConfig, elastic_launch

def rank():
    return int(os.environ["RANK"])

with elasticlib.pool(2) as pool:
    print(pool.run(rank), elastic_launch(LaunchConfig(nproc_per_node=2), rank)())
"""


def test_a_kernel_whose_debugger_is_on_launches_as_without_it() -> None:
    """JupyterLab shows no process but the kernel: pydevd's own children hang there at their start."""
    manager, client = start_new_kernel()
    printed: list[str] = []

    def collect(message: Mapping[str, Any]) -> None:
        if message["msg_type"] in ("stream", "error"):
            printed.append(message["content"].get("text") or message["content"]["evalue"])

    try:
        for number, (command, arguments) in enumerate(ATTACH.items()):
            request = {"type": "request", "seq": number, "command": command, "arguments": arguments}
            client.control_channel.send(client.session.msg("debug_request", request))
            assert client.get_control_msg(timeout=60)["content"]["success"]
        client.execute_interactive("import os; assert hasattr(os, 'original_posix_spawn')", output_hook=collect)
        client.execute_interactive(IN_A_CELL, output_hook=collect, timeout=100)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)

    assert "{0: 0, 1: 1} {0: 0, 1: 1}\n" in "".join(printed)
