"""What `elasticrun manifest` refuses, and the texts for it."""

from __future__ import annotations

import json

import pytest

from elasticlib.cli._manifest import main
from elasticlib.engines import MANIFEST_KINDS
from elasticlib.errors import ConfigError

IMAGE = ("--image", "registry/train:1")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--nodes", "0", "a.py"], "--nodes=0 must be a number, or a range, from 1 on"),
        (["--nodes", "3:2", "a.py"], "--nodes=3:2 must be a number, or a range, from 1 on"),
        (
            ["--nodes", "2:3", "--kind", "trainjob", "a.py"],
            "--nodes=2:3 must be one number: a TrainJob takes a fixed number",
        ),
        (["--name", "A", "a.py"], "--name='A' must be a name of lower-case letters, digits and hyphens"),
        (["--name", "", "a.py"], "--name='' must be a name"),
        (["--name", "a" * 43, "a.py"], "digits and hyphens, up to 42"),
        (["--secret", "My", "a.py"], "--secret='My' must be a name"),
        (["--gpus", "-1", "a.py"], "--gpus=-1 must be 0 or more"),
        (["--grace", "5", "a.py"], "--grace=5 must be above 5 seconds"),
        (["--env", "1A=b", "a.py"], "--env='1A' must be a variable's name"),
        (["--", "--nnodes", "3", "a.py"], "--nnodes: '3' cannot be combined with a manifest, which sets it"),
        (["--", "--rdzv-id", "x", "a.py"], "--rdzv-id: 'x' cannot be combined with a manifest"),
        (["--", "--standalone", "a.py"], "--standalone: True cannot be combined with a manifest"),
    ],
)
def test_values_that_no_cluster_can_run_are_refused(args: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main([*IMAGE, *args])

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["a.py"], "required: --image"),
        ([*IMAGE], "the program is missing"),
        ([*IMAGE, "--kind", "pod", "a.py"], "invalid choice: 'pod'"),
        ([*IMAGE, "--env", "A", "a.py"], "'A' must be NAME=VALUE"),
        ([*IMAGE, "--", "--max-restarts"], "--max-restarts"),
    ],
)
def test_wrong_usage_exits_with_2(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)

    assert 2 == caught.value.code
    assert said in capsys.readouterr().err


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
