"""Rows 173 to 179: sets of processes of one machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.checklist.peers import Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]


def result_of(peer: Peer, code: str) -> Any:
    """Run a program, which must succeed; return the JSON in its last line."""
    done = peer.python(code)
    assert done.returncode == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.row(173)
@pytest.mark.parametrize(
    ("args", "envs"),
    [({0: (), 2: ()}, {0: {}, 2: {}}), ({0: (), 1: ()}, {0: {}}), ({1: ()}, {1: {}})],
    ids=["gap", "missing", "from one"],
)
def test_keys_other_than_0_to_n_1_are_a_runtime_error(peer: Peer, args: Any, envs: Any) -> None:
    multiprocessing = peer.module("multiprocessing")
    specs = multiprocessing.DefaultLogsSpecs(log_dir=str(peer.folder))

    with pytest.raises(RuntimeError):
        multiprocessing.start_processes("row", print, args, envs, specs)


@pytest.mark.row(174)
def test_a_wait_polls_or_ends_at_its_time_or_with_the_result(peer: Peer) -> None:
    """The worker runs until somebody opens the other end of what it reads."""
    facts = result_of(
        peer,
        "import json, os, time\n"
        "from {elastic}.multiprocessing import DefaultLogsSpecs, start_processes\n"
        "os.mkfifo('gate')\n"
        "context = start_processes('row', 'cat', {0: ('gate',)}, {0: {}}, DefaultLogsSpecs(log_dir='logs'))\n"
        "polled = context.wait(0)\n"
        "begun = time.monotonic()\n"
        "timed_out = context.wait(0.2, 0.05)\n"
        "waited = time.monotonic() - begun\n"
        "open('gate', 'w').close()\n"
        "result = context.wait(period=0.05)\n"
        "print(json.dumps([polled, timed_out, waited, result.is_failed(), result.return_values]))\n",
    )

    polled, timed_out, waited, failed, values = facts
    assert (None, None) == (polled, timed_out)
    assert 0.2 <= waited < 10
    assert (False, {"0": None}) == (failed, values)


FUNCTION = """
import json, os, sys
from {elastic}.multiprocessing import DefaultLogsSpecs, start_processes

def work(size):
    return os.environ["WHO"], bytes(size)

if __name__ == "__main__":
    envs = {0: {"WHO": "a"}, 1: {"WHO": "b"}}
    for method in sys.argv[1].split(","):
        size = int(sys.argv[2])
        args = {0: (size,), 1: (size + 1,)}
        context = start_processes("row", work, args, envs, DefaultLogsSpecs(log_dir="logs"), start_method=method)
        result = context.wait()
        found = {rank: [who, len(content)] for rank, (who, content) in sorted(result.return_values.items())}
        print(json.dumps([method, found, result.is_failed()]))
"""


def returned(peer: Peer, methods: str, size: int) -> list[Any]:
    done = peer.python(FUNCTION, methods, str(size))
    assert done.returncode == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.row(175)
def test_return_value_larger_than_a_pipe_is_returned(peer: Peer) -> None:
    size = 5_000_000

    assert [["fork", {"0": ["a", size], "1": ["b", size + 1]}, False]] == returned(peer, "fork", size)


@pytest.mark.row(176)
def test_a_function_runs_by_each_start_method(peer: Peer) -> None:
    found = returned(peer, "spawn,fork,forkserver", 1)

    expected = {"0": ["a", 1], "1": ["b", 2]}
    assert [[method, expected, False] for method in ("spawn", "fork", "forkserver")] == found


@pytest.mark.row(177, improvement=True)
def test_a_second_start_is_refused_and_a_failed_start_leaves_no_process(peer: Peer) -> None:
    """The environment of the second process cannot be had, when torch has started the first one already."""
    facts = result_of(
        peer,
        "import json\n"
        "from {elastic}.multiprocessing import DefaultLogsSpecs, start_processes\n"
        "specs = DefaultLogsSpecs(log_dir='logs')\n"
        "context = start_processes('row', 'true', {0: ()}, {0: {}}, specs)\n"
        "refused = []\n"
        "try:\n"
        "    context.start()\n"
        "except ValueError:\n"
        "    refused.append('second start')\n"
        "context.wait(period=0.05)\n"
        "try:\n"
        "    quiet = ('-c', 'exec sleep 600 >/dev/null 2>&1')\n"
        "    start_processes('row', 'sh', {0: quiet, 1: quiet}, {0: {}, 1: {'A': 1}}, specs)\n"
        "except TypeError:\n"
        "    refused.append('variable')\n"
        "print(json.dumps(refused))\n",
    )

    assert ["second start", "variable"] == facts
    assert peer.wait_until(lambda: not peer.alive(), 5)


@pytest.mark.row(178)
def test_streams_are_chosen_by_number_or_by_rank(peer: Peer) -> None:
    api = peer.module("multiprocessing")
    std = api.Std

    assert [std.NONE, std.OUT, std.ERR, std.ALL] == [std.from_str(str(number)) for number in range(4)]
    assert {0: std.ALL, 1: std.NONE, 2: std.OUT, 3: std.ERR} == std.from_str("0:3,1:0,2:1,3:2")
    for wrong in ("4", "0:4", "a", "", "0:1,", "0:1;1:2"):
        with pytest.raises(ValueError):
            std.from_str(wrong)
    assert {0: std.OUT, 1: std.OUT} == api.to_map(std.OUT, 2)
    assert {0: std.NONE, 1: std.ERR, 2: std.NONE} == api.to_map({1: std.ERR}, 3)


@pytest.mark.row(179)
def test_unknown_stream_is_refused_and_redirected_one_is_restored(peer: Peer) -> None:
    done = peer.python(
        "import os, sys\n"
        "from {elastic}.multiprocessing.redirects import redirect, redirect_stdout\n"
        "try:\n"
        "    with redirect('stdin', 'never'):\n"
        "        pass\n"
        "except ValueError:\n"
        "    print('refused')\n"
        "try:\n"
        "    with redirect_stdout('file'):\n"
        "        print('python')\n"
        "        os.system('echo child')\n"
        "        raise KeyError\n"
        "except KeyError:\n"
        "    print('back')\n"
    )

    assert (0, "refused\nback\n") == (done.returncode, done.out)
    assert ["child", "python"] == sorted((peer.folder / "file").read_text().splitlines())
    assert not (peer.folder / "never").exists()
