"""Refusals of `elasticrun manifest`, and the texts that it writes."""

from __future__ import annotations

import json

import pytest

from elasticlib.cli._manifest import main
from elasticlib.engines import MANIFEST_KINDS
from elasticlib.errors import ConfigError

IMAGE = ("--image", "registry/train:1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nodes", "0", "a.py"], "--nodes=0 must be a number, or a range, from 1 on"),
        (["--nodes", "x", "a.py"], "--nodes: 'x' is neither a number of nodes nor a range such as 1:4"),
        (["--nodes", "3:2", "a.py"], "--nodes=3:2 must be a number, or a range, from 1 on"),
        (
            ["--nodes", "2:3", "--kind", "trainjob", "a.py"],
            "--nodes=2:3 must be one number: a TrainJob takes a fixed number",
        ),
        (["--name", "A", "a.py"], "--name='A' must be a name of lower-case letters, digits and hyphens"),
        (["--name", "", "a.py"], "--name='' must be a name"),
        (["--name", "a" * 43, "a.py"], "digits and hyphens, up to 42"),
        (["--name", "7b", "a.py"], "that begins with a letter"),
        (["--secret", "My", "a.py"], "--secret='My' must be a name"),
        (["--secret", "a..b", "a.py"], "--secret='a..b' must be a name"),
        (["--namespace", "a.b", "a.py"], "--namespace='a.b' must be a name"),
        (
            ["--secret", "a", "--env", "ELASTICLIB_TOKEN=x", "a.py"],
            "--env='ELASTICLIB_TOKEN' is set from the secret: leave one of them out",
        ),
        (
            ["--kind", "jobset", "--env", "JOB_GLOBAL_INDEX=0", "a.py"],
            "--env='JOB_GLOBAL_INDEX' is set by the manifest",
        ),
        (["a.py", "\udcff"], "'\\udcff' is not UTF-8"),
        (["--", "--shutdown-timeout", "9", "a.py"], "cannot be combined with a manifest, which sets it: give --grace"),
        (["--", "--requeue", "3", "a.py"], "--requeue: 3 is for jobs of Slurm: leave it out"),
        (["--", "--nproc-per-node", "0", "a.py"], "--nproc-per-node=0 must be a whole number"),
        (["--", "--redirects", "9", "a.py"], "--redirects: stream selector '9'"),
        (["--gpus", "-1", "a.py"], "--gpus=-1 must be 0 or more"),
        (["--grace", "5", "a.py"], "--grace=5 must be above 5 seconds"),
        (["--env", "1A=b", "a.py"], "--env='1A' must be a variable's name"),
        (["--", "--nnodes", "3", "a.py"], "--nnodes: '3' cannot be combined with a manifest, which sets it"),
        (["--", "--rdzv-id", "x", "a.py"], "--rdzv-id: 'x' cannot be combined with a manifest"),
        (["--", "--standalone", "a.py"], "--standalone: True cannot be combined with a manifest"),
    ],
)
def test_values_that_no_cluster_can_run_are_refused(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main([*IMAGE, *args])

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a.py"], "required: --image"),
        ([*IMAGE], "the program is missing"),
        ([*IMAGE, "--kind", "pod", "a.py"], "invalid choice: 'pod'"),
        ([*IMAGE, "--env", "A", "a.py"], "'A' must be NAME=VALUE"),
        ([*IMAGE, "--", "--max-restarts"], "--max-restarts"),
    ],
)
def test_wrong_usage_exits_with_2(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)

    assert 2 == caught.value.code
    assert message in capsys.readouterr().err


def test_names_that_kubernetes_takes_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    main([*IMAGE, "--namespace", "2026-team", "--secret", "job.token", "a.py"])

    assert '"2026-team"' in capsys.readouterr().out


@pytest.mark.parametrize("kind", MANIFEST_KINDS)
def test_kubernetes_replaces_nothing_in_arguments_and_variables(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would replace $(NAME) by a variable, and $$ by $."""
    main([*IMAGE, "--kind", kind, "--env", "A=$(B)", "train.py", "$(A)", "$$HOME", "$", "two\nlines"])

    container = _container(json.loads(capsys.readouterr().out)["items"][-1])
    assert ["$$(A)", "$$$$HOME", "$$", "two\nlines"] == container["command"][-4:]
    assert {"name": "A", "value": "$$(B)"} in container["env"]


@pytest.mark.parametrize("kind", MANIFEST_KINDS)
def test_the_program_gets_its_arguments_and_variables(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([*IMAGE, "--kind", kind, "--env", "A=b=c", "--", "--max-restarts", "3", "train.py", "--nnodes", "7"])

    text = capsys.readouterr().out
    items = json.loads(text)["items"]
    container = _container(items[-1])
    assert ["--max-restarts", "3", "train.py", "--nnodes", "7"] == container["command"][-5:]
    assert {"name": "A", "value": "b=c"} in container["env"]


def _container(manifest: dict[str, object]) -> dict[str, list[object]]:
    """Return the first object in the manifest that has a command."""
    parts: list[object] = [manifest]
    for part in parts:
        if isinstance(part, dict):
            if "command" in part:
                return part
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    raise AssertionError("no command")
