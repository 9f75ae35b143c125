"""Notebook output of a launch that fails: the user's own lines, once, and few of them."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from tests.benchmarks.kernel import Kernel
from tests.process.console.cells import LIMIT, executed, printed

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

SETUP = """
import os, signal
from elasticlib import ChildFailedError, LaunchConfig, elastic_launch, pool

def settings(workers, **more):
    return LaunchConfig(nproc_per_node=workers, preload=(), **more)

def loss(batch):
    scale = 3
    return batch / (scale - 3)

def train(batch):
    for step in range(3):
        loss(batch + step)
"""


def shown(*cells: str, folder: Path) -> list[Any]:
    """The outputs of each of *cells*, executed after `SETUP`."""
    return [cell.outputs for cell in executed(SETUP, *cells, folder=folder, allow_errors=True)[1:]]


def traceback(outputs: Any) -> list[str]:
    (error,) = (output for output in outputs if output.output_type == "error")
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback)).splitlines()


def test_an_error_of_one_line_shows_few_lines_of_the_users_own(tmp_path: Path) -> None:
    calls = [
        "elastic_launch(settings(4, max_restarts=0), train)(1)",
        "job = elastic_launch(settings(2), train).start(1)\njob.result()",
    ]
    launched, started, pooled = shown(
        *calls, "with pool(2, group=None, preload=()) as p:\n    p.run(train, 1)", folder=tmp_path
    )

    for outputs, call in ((launched, calls[0]), (started, "job.result()"), (pooled, "    p.run(train, 1)")):
        lines = traceback(outputs)
        assert len(lines) <= 15
        assert lines[0].startswith("ZeroDivisionError")
        assert any(re.fullmatch(rf"----> \d {re.escape(call)}", line) for line in lines)
        assert [line for line in lines if line.startswith("Cell In[1]")] == [
            "Cell In[1], line 13, in train",
            "Cell In[1], line 9, in loss",
        ]
        assert "----> 9     return batch / (scale - 3)" in lines
        assert lines.count("ZeroDivisionError: division by zero") == 1
        assert "Traceback" not in printed(outputs)
        assert "elasticlib" not in "\n".join(lines)


def test_error_is_shown_once_although_a_process_group_prints_too(tmp_path: Path) -> None:
    """torch puts a hook around Python's own for each group."""
    call = """
def grouped():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    loss(1)

elastic_launch(settings(1, max_restarts=0, start_method=%r), grouped)()
"""
    for outputs in shown(call % "forkserver", call % "spawn", folder=tmp_path):
        assert "----> 9     return batch / (scale - 3)" in traceback(outputs)
        assert "Traceback" not in printed(outputs)


def test_a_hook_of_the_users_own_is_called(tmp_path: Path) -> None:
    call = """
def hooked():
    import sys
    sys.excepthook = lambda kind, *_: print("hooked", kind.__name__)
    loss(1)

elastic_launch(settings(1, max_restarts=0), hooked)()
"""
    (outputs,) = shown(call, folder=tmp_path)

    assert printed(outputs, "stdout") == "hooked ZeroDivisionError\n"


TRIES = """
from elasticlib import progress

def tries(folder, error, step=None):
    open(f"{folder}/{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").close()
    if step is not None:
        progress(step)
    raise error
"""


def tried(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_error_is_retried_only_if_requested_and_if_retrying_may_help(tmp_path: Path) -> None:
    """The same error of the user's code at once is no accident; one of the system may be."""
    cases = {
        "not asked for": ("", "NameError('a typo')", 1),
        "the same at once": (", max_restarts=3", "NameError('a typo')", 2),
        "of the system": (", max_restarts=2", "FileNotFoundError('data.csv')", 3),
    }
    calls = []
    for name, (restarts, error, _) in cases.items():
        (tmp_path / name).mkdir()
        calls.append(f"elastic_launch(settings(1{restarts}), tries)({str(tmp_path / name)!r}, {error})")
    _, once, twice, _ = shown(TRIES, *calls, folder=tmp_path)

    for name, (_, _, times) in cases.items():
        assert tried(tmp_path / name) == [f"0-{attempt}" for attempt in range(times)], name
    assert traceback(once)[-1] == "NameError: a typo"
    assert printed(twice, "stderr").count("restart") == 1


def test_a_late_error_ends_the_job_where_the_second_attempt_got_no_further(tmp_path: Path) -> None:
    (tmp_path / "known").mkdir()
    (tmp_path / "unknown").mkdir()
    all_are_late = "from elasticlib.agent import _repeats\n_repeats._AT_ONCE = -1.0"
    call = "elastic_launch(settings(1, max_restarts=2), tries)(%r, NameError('a typo'), %r)"
    known, unknown = call % (str(tmp_path / "known"), 5), call % (str(tmp_path / "unknown"), None)
    shown(TRIES, all_are_late, known, unknown, folder=tmp_path)

    assert tried(tmp_path / "known") == ["0-0", "0-1"]
    assert tried(tmp_path / "unknown") == ["0-0", "0-1", "0-2"]


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_prompt_in_a_rank_raises_at_its_line(tmp_path: Path, method: str) -> None:
    prompts = """
def stops():
    breakpoint()

def debugs():
    import pdb
    pdb.set_trace()

def prompts():
    return input("name? ")
"""
    call = f"elastic_launch(settings(2, start_method={method!r}), %s)()"
    pooled = "with pool(2, group=None, preload=()) as p:\n    p.run(stops)"
    _, *found = shown(prompts, *(call % name for name in ("stops", "debugs", "prompts")), pooled, folder=tmp_path)
    texts = ["\n".join(traceback(outputs)) for outputs in found]

    errors = [re.findall(r"^RuntimeError: (.*?) here: a rank that a notebook launched", text, re.M) for text in texts]
    assert errors == [
        ["breakpoint() cannot stop"],
        ["a debugger cannot stop"],
        ["input() cannot ask"],
        ["breakpoint() cannot stop"],
    ]
    for text, line in ((texts[0], "breakpoint()"), (texts[2], 'return input("name? ")'), (texts[3], "breakpoint()")):
        assert re.search(rf"^----> \d +{re.escape(line)}$", text, re.M)
        assert "elasticlib" not in text


def test_an_error_is_caught_by_its_own_kind_and_by_the_launchs(tmp_path: Path) -> None:
    catches = """
class Mine(Exception):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")
        self.code = code

def raises():
    raise Mine(7, why="because")

for kind in (Mine, ChildFailedError):
    try:
        elastic_launch(settings(1, max_restarts=0), raises)()
    except kind as error:
        print(kind.__name__, error.code, isinstance(error, ChildFailedError), len(error.failures))
try:
    elastic_launch(settings(1, max_restarts=0, raise_as="ChildFailedError"), raises)()
except Mine:
    print("no")
except ChildFailedError as error:
    print(type(error.__cause__).__name__)
"""
    (outputs,) = shown(catches, folder=tmp_path)

    assert printed(outputs, "stdout") == "Mine 7 True 1\nChildFailedError 7 True 1\nMine\n"


def test_debug_opens_the_users_frame_with_its_variables_as_text(tmp_path: Path) -> None:
    looks = """
import sys
trace = sys.last_traceback
while trace.tb_next is not None:
    trace = trace.tb_next
frame = trace.tb_frame
print(frame.f_code.co_name, trace.tb_lineno, frame.f_locals["batch"], frame.f_locals["scale"])
"""
    _, outputs = shown("elastic_launch(settings(1, max_restarts=0), train)(41)", looks, folder=tmp_path)

    assert printed(outputs, "stdout") == "loss 9 41 3\n"


class Typed(Kernel):
    """A kernel whose cells ask for input, and get it."""

    def run_typing(self, code: str, *inputs: str) -> str:
        """Run a cell that asks for each of *inputs* at the debugger's prompt; what it shows."""
        number, text, left = self.begin(code), "", [*inputs]
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            with contextlib.suppress(Empty):
                assert self._client.get_stdin_msg(timeout=0.02)["content"]["prompt"].startswith("ipdb>")
                self._client.input(left.pop(0))
            with contextlib.suppress(Empty):
                message = self._client.get_iopub_msg(timeout=0.02)
                if message["parent_header"].get("msg_id") == number:
                    text += message["content"].get("text", "")
                    if message["content"].get("execution_state") == "idle":
                        assert not left
                        return re.sub(r"\x1b\[[0-9;]*m", "", text)
        raise AssertionError(f"the cell did not end; it has shown {text!r}, and was not asked for {left}")


def test_debug_by_typing_shows_the_workers_frames_and_variables() -> None:
    kernel = Typed()
    try:
        kernel.run_typing(SETUP)
        for call in (
            "elastic_launch(settings(1, max_restarts=0), train)(41)",
            "with pool(1, group=None, preload=()) as p: p.run(train, 41)",
        ):
            kernel.run_typing(call)
            text = kernel.run_typing("%debug", "p scale", "p batch", "up", "p batch, step", "q")

            lines = [line for line in text.splitlines() if line.startswith("---") or re.match(r"[\d(]", line)]
            assert [re.sub(r"^-+> +", "> ", line) for line in lines] == [
                "> 9     return batch / (scale - 3)",
                "3",
                "41",
                "> 13         loss(batch + step)",
                "(41, 0)",
            ]
    finally:
        kernel.close()


def test_every_failure_of_a_pool_is_shown_in_few_lines(tmp_path: Path) -> None:
    setup = """
p = pool(2, group=None, preload=())
def deep(n):
    return deep(n + 1)
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
def long():
    raise ValueError("x" * 40_000 + "\\ny" * 50)
def caused():
    try:
        {}["inner"]
    except KeyError as error:
        raise ValueError("outer") from error
"""
    calls = ["p.run(deep, 0)", "p.run(killed)", "p.run(long)", "p.run(caused)", "p.map(loss, [1, 2, 3])", "p.close()"]
    _, *outputs, closed = shown(setup, *calls, folder=tmp_path)

    assert not closed
    deep, killed, long, caused, item = map(traceback, outputs)
    for lines in (deep, killed, long, caused, item):
        assert len(lines) <= 15, lines
        assert max(map(len, lines)) <= 400
        assert "elasticlib" not in "\n".join(lines)
    assert deep[-2:] == ["RecursionError: maximum recursion depth exceeded", "rank 1: the same"] or any(
        line.startswith("RecursionError: maximum recursion depth exceeded") for line in deep
    )
    assert any("SIGKILL" in line for line in killed)
    assert 1 == sum("the cgroup's out-of-memory counter did not move" in line for line in killed)
    assert any("more lines: print(error) shows them" in line for line in long)
    assert caused[caused.index("ValueError: outer") + 1] == "raised from KeyError: 'inner'"
    assert any(re.fullmatch(r"in the worker of rank [01], at item [012]:", line) for line in item)


def test_caller_gets_args_and_type_of_the_workers_own_exception(tmp_path: Path) -> None:
    catches = """
def misses():
    {}["there"]

def waits():
    raise TimeoutError("the worker's")

try:
    elastic_launch(settings(1, max_restarts=0), misses)()
except KeyError as error:
    print(error.args)
job = elastic_launch(settings(1, max_restarts=0), waits).start()
try:
    job.result(40)
except TimeoutError:
    print("it goes on")
except ChildFailedError as error:
    print(repr(error.__cause__))
"""
    (outputs,) = shown(catches, folder=tmp_path)

    assert printed(outputs, "stdout") == "('there',)\nTimeoutError(\"the worker's\")\n"


def test_a_crash_shows_the_line_that_called_native_code(tmp_path: Path) -> None:
    crashes = (
        "def crash():\n    os.kill(os.getpid(), signal.SIGSEGV)\n\nelastic_launch(settings(1, max_restarts=0), crash)()"
    )
    (outputs,) = shown(crashes, folder=tmp_path)

    lines = traceback(outputs)
    assert len(lines) <= 15
    assert "----> 2     os.kill(os.getpid(), signal.SIGSEGV)" in lines
    assert "ended by SIGSEGV" in lines


REFUSED = {
    "function": (
        "import threading\nlock = threading.Lock()\n\ndef holds():\n    return lock\n\n"
        "elastic_launch(settings(1), holds)()",
        r"PicklingError: global variable 'lock' that holds \(CELL\) uses, a lock, cannot be sent",
    ),
    "helper": (
        "def helper():\n    return lock\n\ndef holds(x):\n    return x.train, helper()\n\n"
        "elastic_launch(settings(1), holds)(1)",
        r"PicklingError: global variable 'lock' that helper \(CELL\) uses, a lock, cannot be sent to the "
        r"workers with holds \(CELL\): cannot pickle .*; make it inside the function instead",
    ),
    "setting": ("elastic_launch(settings(0), train)(1)", "SpecError: nproc_per_node=0"),
    "coroutine": (
        "async def later():\n    pass\n\nelastic_launch(settings(1), later)()",
        "EntrypointError: .*coroutine",
    ),
    "pool": (
        "with pool(1, group=None, preload=()) as p:\n    pass\np.run(train, 1)",
        "PoolError: the pool was closed",
    ),
}


def test_refused_call_shows_the_cell_and_the_reason(tmp_path: Path) -> None:
    found = shown(*(call for call, _ in REFUSED.values()), folder=tmp_path)

    for number, (outputs, (name, (_, pattern))) in enumerate(zip(found, REFUSED.items(), strict=True), 2):
        lines = traceback(outputs)
        assert len(lines) <= 15, name
        assert re.match(pattern.replace("CELL", rf"Cell In\[{number}\]"), lines[-1]), name
        assert any(line.startswith(f"Cell In[{number}]") for line in lines), name
        assert "elasticlib/" not in "\n".join(lines), name
