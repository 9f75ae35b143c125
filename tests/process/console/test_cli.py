"""The command line with real processes: exit codes, bad input, what reaches the script."""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

ROOT = pathlib.Path(__file__).resolve().parents[3]
LIMIT = 50.0
"""Seconds that any single command may take."""

REPORT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
facts = {"argv": sys.argv, "name": __name__, **{name: os.environ[name] for name in names}}
with open(f"report{os.environ['RANK']}", "w") as file:
    json.dump(facts, file)
"""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    inherited.pop("LOGLEVEL", None)
    return {**inherited, "PYTHONPATH": str(ROOT), **(extra or {})}


class Shell:
    """Runs `elasticrun` in a folder of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def script(self, code: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(code)
        return name

    def start(self, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticlib.run", *args],
            cwd=self.folder,
            env=environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """End what a test that failed has left running."""
        for process in self.started:
            process.kill()
            process.communicate()

    def run(self, *args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        with self.start(*args, env=env) as process:
            try:
                out, err = process.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def reports(self) -> list[dict[str, object]]:
        """Return the reports of workers that ran `REPORT`, by rank."""
        files = sorted(self.folder.glob("report*"), key=lambda file: int(file.name.removeprefix("report")))
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


def test_a_job_that_succeeds_exits_with_0(shell: Shell) -> None:
    """Row 087."""
    done = shell.run("--nproc-per-node", "2", shell.script(REPORT), "a")

    assert (0, "") == (done.returncode, done.stderr)
    assert [("0", "2"), ("1", "2")] == [(each["RANK"], each["WORLD_SIZE"]) for each in shell.reports()]


def test_arguments_reach_the_script_to_the_letter(shell: Shell) -> None:
    """Row 005, and `$$` stays as it is."""
    arguments = ["--lr", "", "--", "--tee=3", "-m", "pa$$word", "two words", "ü"]

    done = shell.run(shell.script(REPORT), *arguments)

    assert 0 == done.returncode, done.stderr
    assert ["script.py", *arguments] == shell.reports()[0]["argv"]


def test_local_rank_in_an_argument_is_replaced_by_the_workers_rank(shell: Shell) -> None:
    """Row 042."""
    done = shell.run("--nproc-per-node", "2", shell.script(REPORT), "--out=${local_rank}.txt", "${other}")

    assert 0 == done.returncode, done.stderr
    assert [["--out=0.txt", "${other}"], ["--out=1.txt", "${other}"]] == [
        list(each["argv"])[1:]  # type: ignore[call-overload]
        for each in shell.reports()
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [((), "script.py"), ((), "./script.py"), ((), "script"), (("--run-path", "--no-python"), "script.py")],
)
def test_file_with_any_name_runs_as_a_python_script(shell: Shell, options: tuple[str, ...], name: str) -> None:
    """Rows 035 and 040."""
    shell.script(REPORT, name)

    done = shell.run(*options, name, "a")

    assert 0 == done.returncode, done.stderr
    assert ("__main__", [name, "a"]) == (shell.reports()[0]["name"], shell.reports()[0]["argv"])


def test_a_module_runs_as_python_m_would(shell: Shell) -> None:
    """Row 037."""
    (shell.folder / "pkg").mkdir()
    shell.script("", "pkg/__init__.py")
    shell.script(REPORT, "pkg/mod.py")

    done = shell.run("-m", "pkg.mod", "a")

    assert 0 == done.returncode, done.stderr
    assert ("__main__", [str(shell.folder / "pkg" / "mod.py"), "a"]) == (
        shell.reports()[0]["name"],
        shell.reports()[0]["argv"],
    )


def test_a_program_runs_without_an_interpreter(shell: Shell) -> None:
    """Row 038."""
    done = shell.run("--no-python", "--nproc-per-node", "2", "sh", "-c", 'echo "worker $RANK of $WORLD_SIZE $0"', "x")

    assert 0 == done.returncode, done.stderr
    assert ["worker 0 of 2 x", "worker 1 of 2 x"] == sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), "import sys; sys.exit(0)"),
        ((), "import sys; sys.exit()"),
        ((), ""),
        (("--run-path",), "import sys; sys.exit()"),
    ],
)
def test_a_script_that_ends_well_is_a_success(shell: Shell, options: tuple[str, ...], code: str) -> None:
    """Row 041."""
    done = shell.run(*options, shell.script(code))

    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("code", "facts"),
    [
        ("import sys; sys.exit(3)", ["exitcode  : 3"]),
        ("import os; os._exit(5)", ["exitcode  : 5"]),
        ("import os; os.kill(os.getpid(), 9)", ["exitcode  : -9", "SIGKILL"]),
        ("raise ValueError('no such digit')", ["exitcode  : 1", "ValueError", "no such digit"]),
        ("import no_such_module", ["exitcode  : 1", "ModuleNotFoundError", "no_such_module"]),
        ("def (", ["exitcode  : 1", "SyntaxError"]),
    ],
)
def test_a_worker_that_fails_makes_exit_status_1_and_a_summary(shell: Shell, code: str, facts: list[str]) -> None:
    """Rows 088, 089 and 091."""
    done = shell.run(shell.script(code))

    assert 1 == done.returncode
    summary = done.stderr[done.stderr.index("script.py FAILED") :]
    assert [] == [fact for fact in [*facts, "Root Cause", "(local_rank: 0)"] if fact not in summary]
    assert "elasticlib/run.py" not in done.stderr


def test_a_failure_is_restarted_as_often_as_allowed(shell: Shell) -> None:
    """Rows 117 and 118."""
    code = "import os, sys; sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 2)"

    enough = shell.run("--max-restarts", "2", shell.script(code))
    too_few = shell.run("--max-restarts", "1", shell.script(code))

    assert (0, 1) == (enough.returncode, too_few.returncode)


def refused(done: subprocess.CompletedProcess[str], *named: str) -> None:
    assert 2 == done.returncode, done.stderr
    assert done.stderr.splitlines()[-1].startswith("elasticrun: error: ")
    assert [] == [word for word in named if word not in done.stderr]
    assert "Traceback" not in done.stderr
    assert "" == done.stdout


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["nowhere.py"], "nowhere.py"),
        (["folder"], "folder"),
        (["--no-python", "no-such-program"], "no-such-program"),
        (["--no-python", "./script.py"], "script.py"),
        (["--nproc-per-node", "xpu", "script.py"], "xpu"),
        (["--max-restarts", "-1", "script.py"], "--max-restarts=-1"),
        (["--log-dir", "script.py", "script.py"], "script.py"),
        (["--log-dir", "script.py/below", "script.py"], "script.py"),
        (["--log-dir", "/proc/nowhere", "script.py"], "/proc/nowhere"),
        (["--preload", "no_such_module", "script.py"], "no_such_module"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:port", "script.py"], "--rdzv-endpoint='node0:port'"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", ":29400", "script.py"], "the host is missing"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "script.py"], "free port"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--master-addr", "localhost", "script.py"],
            "--node-rank=2 is out of range",
        ),
        (["--rdzv-backend", "nonsense", "--rdzv-endpoint", "x", "script.py"], "--rdzv-backend='nonsense'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_before_a_worker_starts(shell: Shell, args: list[str], named: str) -> None:
    """Values that the parser or `LaunchConfig` refuses are in tests/unit/test_run.py, but for one."""
    shell.script("open('started', 'w')")
    (shell.folder / "folder").mkdir()

    done = shell.run(*args)

    refused(done, named)
    assert not (shell.folder / "started").exists()


def test_missing_tls_files_are_refused_before_any_request_to_a_server(shell: Shell) -> None:
    conf = "protocol=https,ca_cert=nowhere.pem"
    options = ["--nnodes", "2", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", "localhost:1", "--rdzv-id", "job7"]

    done = shell.run(*options, "--rdzv-conf", conf, shell.script(""))

    refused(done, "nowhere.pem")


def test_a_script_that_may_not_be_read_is_refused(shell: Shell) -> None:
    script = shell.folder / shell.script("")
    script.chmod(0)
    # Root reads everything, but may not run a file that nobody may run.
    options = ["--no-python"] if os.access(script, os.R_OK) else []

    done = shell.run(*options, f"./{script.name}")

    refused(done, script.name)


def test_gpu_workers_without_a_gpu_are_refused(shell: Shell) -> None:
    """Row 017."""
    done = shell.run("--nproc-per-node", "gpu", shell.script(""), env={"CUDA_VISIBLE_DEVICES": ""})

    refused(done, "gpu")


def test_cpu_workers_are_as_many_as_the_affinity_mask_allows(shell: Shell) -> None:
    """Row 016."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        done = shell.run("--nproc-per-node", "cpu", shell.script(REPORT))
    finally:
        os.sched_setaffinity(0, allowed)

    assert 0 == done.returncode, done.stderr
    assert ["1"] == [each["WORLD_SIZE"] for each in shell.reports()]


def test_auto_means_the_number_of_cpus_without_a_device(shell: Shell) -> None:
    """Row 018."""
    done = shell.run("--nproc-per-node", "auto", shell.script(REPORT), env={"CUDA_VISIBLE_DEVICES": ""})

    assert 0 == done.returncode, done.stderr
    assert len(os.sched_getaffinity(0)) == len(shell.reports())


def test_jobs_stacked_on_one_machine_do_not_meet(shell: Shell) -> None:
    init = (
        "import sys\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "sys.stdout.write(f'world {dist.get_world_size()}\\n')\n"
        "dist.destroy_process_group()\n"
    )
    script = shell.script(init)
    options = "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id X --nproc-per-node".split()

    started = [shell.start(*options, str(workers), script) for workers in (1, 2)]
    outputs = [process.communicate(timeout=LIMIT) for process in started]

    assert [0, 0] == [process.returncode for process in started], outputs
    assert ["world 1\n", "world 2\nworld 2\n"] == [out for out, _ in outputs]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("backend", ["c10d", "static", "file"])
def test_nodes_that_are_given_the_same_place_are_one_job(shell: Shell, backend: str) -> None:
    """Rows 024, 025 and 129."""
    script, port = shell.script(REPORT), free_port()
    places = {
        "c10d": [["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]] * 2,
        "static": [["--master-addr", "127.0.0.1", f"--master-port={port}", f"--node-rank={rank}"] for rank in (0, 1)],
        "file": [["--rdzv-backend", "c10d", "--rdzv-endpoint", "store", "--rdzv-conf", "store_type=file"]] * 2,
    }
    common = ["--nnodes", "2", "--preload", "", "--rdzv-id", "job7", "--nproc-per-node"]

    started = [shell.start(*common, str(2 - i), *place, script) for i, place in enumerate(places[backend])]
    outputs = [process.communicate(timeout=LIMIT) for process in started]

    assert [0, 0] == [process.returncode for process in started], outputs
    assert [(str(rank), "3", "job7") for rank in range(3)] == [
        (each["RANK"], each["WORLD_SIZE"], each["TORCHELASTIC_RUN_ID"]) for each in shell.reports()
    ]


def test_all_nodes_of_a_job_end_with_the_same_root_cause(shell: Shell) -> None:
    code = "import os, signal\nif os.environ['RANK'] == '1':\n    raise ValueError('no such digit')\nsignal.pause()"
    options = ["--nnodes", "2", "--preload", "", "--rdzv-id", "job7", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", shell.script(code)]

    started = [shell.start(*options) for _ in range(2)]
    errors = [process.communicate(timeout=LIMIT)[1] for process in started]

    assert [1, 1] == [process.returncode for process in started], errors
    roots = [text[text.index("Root Cause") :] for text in errors]
    assert [True, True] == ["rank      : 1" in root and "no such digit" in root for root in roots], errors


def test_a_spare_that_was_not_needed_exits_with_0(shell: Shell) -> None:
    """Row 133."""
    code = "import os, time\nos.mknod('up')\nwhile not os.path.exists('go'):\n    time.sleep(0.01)"
    options = ["--nnodes", "1", "--preload", "", "--rdzv-id", "job7", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", shell.script(code)]
    first = shell.start(*options)
    wait_until((shell.folder / "up").exists)
    spare = shell.start(*options)
    assert spare.stderr is not None
    assert select.select([spare.stderr], [], [], LIMIT)[0], "the spare does not say that it waits"

    (shell.folder / "go").touch()
    outputs = [process.communicate(timeout=LIMIT) for process in (first, spare)]

    assert [0, 0] == [first.returncode, spare.returncode], outputs


def test_node_without_the_token_is_refused_and_prints_the_reason(shell: Shell) -> None:
    code = "import os, time\nos.mknod('up')\nwhile not os.path.exists('go'):\n    time.sleep(0.01)"
    options = ["--nnodes", "1:2", "--preload", "", "--rdzv-id", "job7", "--rdzv-backend", "c10d", "--wait-for", "min"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", shell.script(code)]
    first = shell.start(*options, env={"ELASTICLIB_TOKEN": "s3cret"})
    wait_until((shell.folder / "up").exists)

    stranger = shell.run(*options)
    (shell.folder / "go").touch()
    out, err = first.communicate(timeout=LIMIT)

    assert 1 == stranger.returncode
    assert "token" in stranger.stderr
    assert "s3cret" not in stranger.stderr + err
    assert 0 == first.returncode, (out, err)


def test_workers_see_the_job_id(shell: Shell) -> None:
    """Rows 055 and 084."""
    done = shell.run("--rdzv-backend", "c10d", "--rdzv-id", "job/7", shell.script(REPORT))

    assert 0 == done.returncode, done.stderr
    assert ["job/7"] == [each["TORCHELASTIC_RUN_ID"] for each in shell.reports()]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_job_with_status_1_and_one_line(shell: Shell, signum: signal.Signals) -> None:
    """Rows 103 and 104."""
    code = "import os, signal\nos.mknod('up')\nsignal.pause()"
    with shell.start("--shutdown-timeout", "5", shell.script(code)) as process:
        wait_until((shell.folder / "up").exists)

        process.send_signal(signum)
        _, err = process.communicate(timeout=LIMIT)

    assert 1 == process.returncode, err
    lines = [line for line in err.splitlines() if line.startswith("elasticrun: ")]
    assert 1 == len(lines)
    assert signum.name in lines[0]
    assert "elasticlib/run.py" not in err


def test_the_module_and_the_package_are_the_same_command(shell: Shell) -> None:
    answers = [
        subprocess.run(
            [sys.executable, "-m", name, "--help"], check=True, capture_output=True, text=True, env=environment()
        ).stdout
        for name in ("elasticlib.run", "elasticlib")
    ]

    assert answers[0].startswith("usage: elasticrun ")
    assert answers[0] == answers[1]
