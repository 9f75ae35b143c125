"""Reports of a failure: the summary, error files of all kinds, and the one true cause."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, DefaultLogsSpecs, LaunchConfig, ProcessFailure, Std, elastic_launch
from tests.process import duties

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

ROOT = Path(__file__).parents[3]


def elasticrun(folder: Path, code: str, *options: str, **environment: str) -> tuple[int, str]:
    """Exit status and stderr of a job of two workers that run *code*, which finds the folder as ``here``."""
    script = folder / "script.py"
    script.write_text(f"from pathlib import Path\nhere = Path({str(folder)!r})\n{code}\n")
    command = [sys.executable, "-m", "elasticlib.run", "--nproc-per-node", "2", *options]
    if "--no-python" in options:
        command.append(sys.executable)
    inherited = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    done = subprocess.run(
        [*command, str(script)],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def summary_of(stderr: str) -> str:
    """The framed text at the end."""
    frame = re.search(r"^={5,}\n.*^={5,}$", stderr, re.DOTALL | re.MULTILINE)
    assert frame is not None, stderr
    return frame.group()


def failed(duty: Callable[..., Any], *args: Any, workers: int = 2, **settings: Any) -> ChildFailedError:
    """Return the error that a launch of *duty* raises."""
    config = LaunchConfig(nproc_per_node=workers, **{"max_restarts": 0, "preload": (), **settings})
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, duty)(*args)
    return caught.value


def logs(folder: Path, redirects: Std = Std.NONE) -> DefaultLogsSpecs:
    """Logs and error files below *folder*."""
    return DefaultLogsSpecs(str(folder / "logs"), redirects)


# The summary.

TWO_FAILURES = """
from tests.process import duties
duties.fails_when_stopped(here) if os.environ["RANK"] == "0" else duties.fails_beside(here)
"""


def test_summary_shows_for_each_failure_all_that_is_known(tmp_path: Path) -> None:
    """Row 091: rank 1 raised, rank 0 raised something else when it was told to end; each stack stands there once."""
    status, stderr = elasticrun(tmp_path, "import os" + TWO_FAILURES, "--preload", "", "--log-dir", str(tmp_path))

    summary = summary_of(stderr)
    others, root = summary.split("Root Cause (first observed failure):")
    assert 1 == status
    assert "script.py FAILED" in others
    assert "rank      : 0 (local_rank: 0)" in others
    assert "RuntimeError: could not save" in others
    assert "rank      : 1 (local_rank: 1)" in root
    assert "ValueError: a bad value" in root
    for block in (others, root):
        assert re.search(r"time      : \d{4}-\d\d-\d\d_\d\d:\d\d:\d\d\.\d{3}$", block, re.MULTILINE)
        assert f"host      : {os.uname().nodename}" in block
        assert re.search(r"exitcode  : 1 \(pid: \d+\)$", block, re.MULTILINE)
        assert re.search(rf"error_file: {re.escape(str(tmp_path))}/.*error\.json$", block, re.MULTILINE)
        cause = re.search(r"traceback : (\w+: [\w ]+) \(.*\): see above$", block, re.MULTILINE)
        assert cause
        assert stderr.count(f"\n{cause[1]}\n") == 1
    assert len(re.findall(r"Traceback .*\n(?: .*\n)*? .*script\.py\", line \d+, in <module>", stderr)) == 2


def test_the_summary_shows_the_last_lines_of_a_redirected_stderr(tmp_path: Path) -> None:
    code = "import os, sys\nfor i in range(100):\n    print('line', i, file=sys.stderr)\nos._exit(3)"

    _, stderr = elasticrun(tmp_path, code, "--preload", "", "--redirects", "3", "--log-dir", str(tmp_path))

    root = summary_of(stderr).split("Root Cause")[1]
    assert re.findall(r"^ +line (\d+)$", root, re.MULTILINE) == [str(number) for number in range(90, 100)]


@pytest.mark.parametrize("redirects", ["0", "3"])
def test_the_summary_shows_where_python_was_at_a_crash(redirects: str, tmp_path: Path) -> None:
    """The stack does not depend on where stderr goes, nor on an open stderr."""
    code = "import ctypes, os\ndef touch_nothing():\n    os.close(2)\n    ctypes.string_at(0)\ntouch_nothing()"

    status, stderr = elasticrun(tmp_path, code, "--preload", "", "--redirects", redirects)

    root = summary_of(stderr).split("Root Cause")[1]
    assert 1 == status
    assert re.search(r"exitcode  : -11 \(pid: \d+, SIGSEGV\)", root)
    assert re.search(r'File ".*script\.py", line 6 in touch_nothing', root)
    assert "hint      : native code crashed" in root


def test_program_other_than_python_is_reported_by_its_exit_status() -> None:
    """Row 093: there is no traceback and no error file."""
    config = LaunchConfig(nproc_per_node=1, max_restarts=0, no_python=True)

    with pytest.raises(ChildFailedError, match=r"error_file: <N/A>\n +traceback : The worker ended with exit status 7"):
        elastic_launch(config, "sh")("-c", "exit 7")


# Error files.

RECORDED = """
{imports}

@record
def main():
    raise ValueError("a bad value")

main()
"""
BY_TORCH = RECORDED.format(imports="from torch.distributed.elastic.multiprocessing.errors import record")
BY_US = RECORDED.format(imports="from elasticlib import record")


@pytest.mark.parametrize("code", [BY_TORCH, BY_US], ids=["torch", "elasticlib"])
@pytest.mark.parametrize("way", ["--no-python", "--start-method=forkserver"])
def test_recorded_error_is_reported_with_its_traceback(way: str, code: str, tmp_path: Path) -> None:
    """Rows 092 and 094: of a program the error file is all that there is; a worker's stderr has shown it already."""
    status, stderr = elasticrun(tmp_path, code, way, "--log-dir", str(tmp_path))

    root = summary_of(stderr).split("Root Cause")[1]
    text = root if way == "--no-python" else stderr.partition("script.py FAILED")[0]
    assert 1 == status
    assert re.search(r'script\.py", line \d+, in main\n +raise ValueError\("a bad value"\)', text)
    error_file = Path(re.findall(r"error_file: (.*)", root)[0])
    entry = json.loads(error_file.read_text())["message"]
    assert "ValueError: a bad value" in entry["message"]
    assert {"py_callstack", "timestamp"} <= set(entry["extraInfo"])


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (5, 5)])
def test_an_exit_status_passes_record_and_is_not_recorded(code: int, expected: int, tmp_path: Path) -> None:
    """Row 099."""
    script = f"from elasticlib import record\nimport sys\nrecord(sys.exit)({code})"

    status, stderr = elasticrun(tmp_path, script, "--preload", "", "--log-dir", str(tmp_path))

    assert (1 if expected else 0) == status
    assert bool(expected) == (f"exitcode  : {expected} (pid" in stderr)
    assert [] == list(tmp_path.rglob("error.json"))


def test_record_without_a_file_to_write_to_only_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 100."""
    from elasticlib import record

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match="a bad value"):
        record(duties.fails)()

    assert [] == list(tmp_path.iterdir())


def only_failure(error: ChildFailedError) -> ProcessFailure:
    (failure,) = error.failures.values()
    return failure


def test_plain_message_in_an_error_file_is_reported(tmp_path: Path) -> None:
    """Row 095."""
    content = json.dumps({"message": "told by a library in C++", "timestamp": 1700000000})

    failure = only_failure(failed(duties.leaves_error_file, content, workers=1, logs_specs=logs(tmp_path)))

    assert ("told by a library in C++", 7) == (failure.message, failure.exitcode)


@pytest.mark.parametrize("content", ['{"message": {"mess', "\0\xff"])
def test_senseless_error_file_hides_no_failure_and_no_restart(content: str, tmp_path: Path) -> None:
    """Row 096."""
    config = LaunchConfig(nproc_per_node=1, max_restarts=1, preload=(), logs_specs=logs(tmp_path))

    assert {0: "1"} == elastic_launch(config, duties.leaves_error_file)(content)


def test_the_launchers_own_error_file_gets_the_root_cause(tmp_path: Path) -> None:
    """Row 098: whoever started the launcher learns of the cause, with the worker's exit code."""
    mine = tmp_path / "mine.json"
    code = "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(60)\nraise ValueError('a bad value')"

    elasticrun(tmp_path, code, "--preload", "", TORCHELASTIC_ERROR_FILE=str(mine))

    entry = json.loads(mine.read_text())["message"]
    assert ("ValueError: a bad value", 1) == (entry["message"], entry["errorCode"])


# Exceptions that are hard to tell.


def test_exception_that_cannot_be_shown_is_reported_by_its_class() -> None:
    failure = only_failure(failed(duties.raises_what_cannot_be_shown, workers=1))

    assert "UnshowableError" in failure.exception_type
    assert "raise UnshowableError" in failure.traceback


@pytest.mark.parametrize(
    "text", ["\udc80 and \0 and \x1b[31m", "long " * 10_000, "one\ntwo\n\nfour"], ids=["odd", "long", "lines"]
)
def test_a_message_of_any_kind_arrives_whole(text: str, tmp_path: Path) -> None:
    error = failed(duties.raises_text, text, workers=1, logs_specs=logs(tmp_path))

    assert f"ValueError: {text}" == only_failure(error).message
    assert text == str(error.__cause__)


def test_a_message_longer_than_anybody_reads_keeps_its_ends(tmp_path: Path) -> None:
    """Else a report of megabytes is copied, logged and printed again and again."""
    text = "begin" + "x" * 5_000_000 + "end"

    error = failed(duties.raises_text, text, workers=1, logs_specs=logs(tmp_path))

    message = only_failure(error).message
    assert message.startswith("ValueError: beginx") and message.endswith("xend")
    assert len(message) < 70_000
    assert "characters left out" in message
    assert text == str(error.__cause__)


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_exception_that_cannot_be_pickled_whole_is_a_partial_cause(method: str) -> None:
    error = failed(duties.raises_what_cannot_be_pickled_whole, workers=1, start_method=method)

    cause = error.__cause__
    assert isinstance(cause, duties.HoldsALockError)
    assert ("a bad value", 5, False) == (str(cause), cause.code, hasattr(cause, "lock"))
    shown = "".join(traceback.format_exception(cause))
    assert 'raise HoldsALockError("a bad value")' in shown


def test_chain_of_exceptions_is_reported_from_its_beginning() -> None:
    """The cause of the cause is in the traceback, and in the exception that the caller gets."""
    error = failed(duties.raises_a_chain, workers=1)

    assert "KeyError: 'first'" in only_failure(error).traceback
    assert "RuntimeError: second" in only_failure(error).message
    assert isinstance(error.__cause__, RuntimeError)
    assert 'raise KeyError("first")' in only_failure(error).traceback


# The root cause.


@pytest.mark.parametrize(
    ("end", "cause", "repetitions"),
    [
        ("raises", (1, 1, "ValueError"), 10),
        ("killed", (1, -9, ""), 10),
        ("exits", (1, 4, ""), 3),
        ("quits", (1, 3, ""), 3),
    ],
)
def test_a_lost_connection_is_never_the_root_cause(end: str, cause: tuple[int, int, str], repetitions: int) -> None:
    """Row 097: rank 1 fails and the others, in a collective of gloo, learn of it by a closed connection."""
    for _ in range(repetitions):
        error = failed(duties.fails_in_a_collective, end, workers=3, preload=("torch",))

        rank, failure = error.get_first_failure()
        assert cause == (rank, failure.exitcode, failure.exception_type)
        assert [True, False, True] == [error.failures[rank].secondary for rank in range(3)]


SHOWN = {
    "error": "def inner():\n    raise ValueError('a bad value')\ninner()",
    "chain": "try:\n    {}['first']\nexcept KeyError as error:\n    raise RuntimeError('second') from error",
    "syntax": "x = (",
    "exit": "import sys\nsys.exit('the reason')",
    "interrupt": "raise KeyboardInterrupt",
    "stream": "import sys\nclass Tee:\n    def write(self, text): pass\n    def __repr__(self): return 'Tee()'\n"
    "sys.stdout = Tee()\nraise ValueError('a bad value')",
    "broken stream": "import sys\nclass Tee:\n    def write(self, text): pass\n    def __repr__(self): return 'Tee()'\n"
    "    def flush(self):\n        raise OSError('closed')\nsys.stdout = Tee()\nsys.exit(3)",
    "no descriptor": "import resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\nsys.exit('the reason')",
    "hook": "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_frame.f_code.co_name, "
    "file=sys.stderr)\nraise ValueError('a bad value')",
}


@pytest.mark.parametrize("name", SHOWN)
def test_failing_script_prints_the_same_stderr_as_under_python(name: str, tmp_path: Path) -> None:
    """Its stderr is that of ``python -u``: no frame of the launcher is in the traceback."""
    script = tmp_path / "script.py"
    script.write_text(SHOWN[name])
    plain = subprocess.run([sys.executable, "-u", str(script)], capture_output=True, text=True, check=False)
    assert plain.returncode != 0

    with pytest.raises(ChildFailedError):
        config = LaunchConfig(nproc_per_node=1, max_restarts=0, preload=(), logs_specs=logs(tmp_path, Std.ERR))
        elastic_launch(config, script)()

    (log,) = tmp_path.rglob("stderr.log")
    assert plain.stderr == log.read_text()
