"""The subcommand ``elasticrun submit``: the text of its job, and wrong values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from elasticlib.cli import _submit
from elasticlib.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def test_script_runs_the_command_on_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--time", "1:00:00", "--sbatch", "gpus-per-node=8"]
    more = ["--sbatch", "exclusive", "--print"]
    _submit.main(
        [*options, *more, "--", "--requeue", "3", "--nproc-per-node", "auto", "a/train.py", "--name", "two words"]
    )

    assert (
        f"""\
#!/bin/bash
#SBATCH --job-name=train.py
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --time=1:00:00
#SBATCH --gpus-per-node=8
#SBATCH --exclusive

srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --no-kill --wait=0 --kill-on-bad-exit=0 {sys.executable} \
-m elasticlib.run --requeue 3 --nproc-per-node auto a/train.py --name 'two words'
"""
        == capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes=0 must be"),
        (["--nodes", "2", "--time", "1h"], "--time='1h' must be"),
        (["--nodes", "2", "--sbatch", "output=x"], "--sbatch='output' cannot be given"),
        (["--nodes", "2", "--sbatch", "comment="], "--sbatch.'comment'.='' must be one line"),
    ],
)
def test_wrong_value_is_refused_by_its_option(options: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _submit.main([*options, "--", "train.py"])


def test_more_nodes_than_the_job_has_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="--nnodes 3:4: the job has --nodes 2, and would wait for more; leave --nnodes out"
    ):
        _submit.main(["--nodes", "2", "--", "--nnodes", "3:4", "train.py"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--standalone"], "--standalone: each of the 2 nodes would run a job of its own"),
        (["--node-rank", "1"], "--node-rank 1: all 2 nodes would take this place"),
        (["--nproc-per-node", "0"], "--nproc-per-node=0 must be a whole number of at least 1"),
        (["--redirects", "9"], "--redirects: stream selector '9'"),
    ],
)
def test_options_that_would_fail_on_the_nodes_are_refused(options: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _submit.main(["--nodes", "2", "--print", "--", *options, "train.py"])


@pytest.mark.parametrize(
    "options",
    [
        ["--nnodes", "1:2"],
        ["--requeue", "3"],
        ["--progress"],
        ["--rdzv-endpoint", "h:29500"],
        ["--engine", "slurm"],
        ["--logs-specs", "of_the_container"],
    ],
)
def test_options_for_several_nodes_reach_them(options: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    _submit.main(["--nodes", "2", "--print", "--", *options, "train.py"])

    assert f" -m elasticlib.run {' '.join(options)} train.py\n" in capsys.readouterr().out


@pytest.mark.parametrize("interpreter", ["python", "/usr/bin/python3.11"])
def test_interpreter_before_the_script_is_refused(interpreter: str) -> None:
    with pytest.raises(ConfigError, match="is an interpreter, which elasticrun starts for a script: leave it out"):
        _submit.main(["--nodes", "2", "--print", "--", interpreter, "train.py"])


def test_arguments_pass_through_the_shell_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["", "two words", "$(date) `id` $HOME", "a\n#SBATCH --uid=0", "ünï", "'\"\\", "*", "x" * 100_000]
    _submit.main(["--nodes", "2", "--print", "--", "train.py", *arguments])

    [step] = capsys.readouterr().out.split("\n\n")[1:]
    line = "srun() { printf '%s\\0' \"$@\"; }\n" + step
    shown = subprocess.run(["/bin/bash"], input=line, capture_output=True, text=True, check=True).stdout
    assert arguments == shown.split("\0")[-len(arguments) - 1 : -1]


@pytest.mark.parametrize(
    "args",
    [
        ["--", "train.py"],
        ["--nodes", "2"],
        ["--nodes", "2", "--engine", "lsf", "--", "train.py"],
        ["--nodes", "2", "--", "--no-such-option", "train.py"],
        ["--nodes", "2", "--", "--max-restarts", "1"],
    ],
)
def test_wrong_usage_exits_with_2(args: Sequence[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _submit.main(args)


@pytest.mark.parametrize(
    ("command", "is_warned"), [(["no-such.py"], True), ([__file__], False), (["-m", "no.such"], False)]
)
def test_a_script_that_this_machine_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    command: list[str],
    is_warned: bool,
) -> None:
    monkeypatch.setattr(_submit, "check_nodes", lambda nodes, partition: None)
    monkeypatch.setattr(_submit, "submit_script", lambda path, options, environ: "42")
    _submit.main(["--nodes", "2", "--", *command])

    assert "42\n" == capsys.readouterr().out
    assert is_warned == ("no-such.py does not exist on this machine: the nodes must have it, in /" in caplog.text)
