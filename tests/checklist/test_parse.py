"""Rows 001 to 020, and what other rows say of the same: how the command line is read."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.checklist.peers import TORCHRUN, Peer

NOT_PRIVATE = ("--master-port", "29501")
"""Keeps the static rendezvous of torchrun, so that no other value is chosen for the ones that are read."""

OPTIONS = """
    --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --max-restarts
    --monitor-interval --start-method --event-log-handler --role --module --no-python --run-path --log-dir --redirects
    --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr
    --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --virtual-local-rank
""".split()


def read(line: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command of the shell, and the arguments."""
    words = shlex.split(line)
    return dict(word.split("=", 1) for word in words if word.startswith("PET_")), [
        word for word in words if not word.startswith("PET_")
    ]


def cases(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the parameters of a table whose lines begin with the row and the command line."""
    return [
        pytest.param(line, *values, marks=pytest.mark.row(number), id=f"{number:03} {line}")
        for number, line, *values in rows
    ]


@pytest.mark.parametrize(
    ("line", "fields"),
    cases(
        [
            (1, "--nnodes 3", {"min_nodes": 3, "max_nodes": 3}),
            (1, "--nnodes 2:5", {"min_nodes": 2, "max_nodes": 5}),
            (3, "", {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1}),
            (8, "PET_MAX_RESTARTS=5 PET_ROLE=reader --role trainer", {"max_restarts": 5, "role": "trainer"}),
            (9, "PET_MAX_RESTARTS=2", {"max_restarts": 2}),
            (9, "PET_MONITOR_INTERVAL=0.25", {"monitor_interval": 0.25}),
            (9, "PET_ROLE=5", {"role": "5"}),
            (12, "--start-method spawn", {"start_method": "spawn"}),
            (12, "--start-method fork", {"start_method": "fork"}),
            (12, "--start-method forkserver", {"start_method": "forkserver"}),
        ]
    ),
)
def test_options_and_variables_set_the_fields_of_a_launch(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, line: str, fields: dict[str, object]
) -> None:
    """A variable gives the default, converted to the field's type; the command line wins."""
    variables, args = read(line)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    config, _, _ = peer.parse(*args, *NOT_PRIVATE, "script.py")

    found = {name: getattr(config, name) for name in fields}
    assert fields == found
    assert list(map(type, fields.values())) == list(map(type, found.values()))


@pytest.mark.parametrize(
    ("line", "error", "match"),
    cases(
        [
            (2, "--nnodes 1:2:3", RuntimeError, None),
            (2, "--nnodes x", ValueError, None),
            (2, "--nnodes 0", AssertionError, None),
            (2, "--nnodes 0:1", AssertionError, None),
            (2, "--nnodes 3:2", AssertionError, None),
            (10, "PET_STANDALONE=true", ValueError, None),
            (10, "PET_STANDALONE=", ValueError, None),
            (13, "--max-restarts=-1", AssertionError, "max.restarts"),
            (29, "--rdzv-backend mine --rdzv-endpoint h:1 --rdzv-conf a", ValueError, None),
            (29, "--rdzv-backend mine --rdzv-endpoint h:1 --rdzv-conf a=", ValueError, None),
            (29, "--rdzv-backend mine --rdzv-endpoint h:1 --rdzv-conf =1", ValueError, None),
            (29, "--rdzv-backend mine --rdzv-endpoint h:1 --rdzv-conf a=1,,b=2", ValueError, None),
            (39, "--no-python -m", ValueError, None),
            (68, "-r 4", ValueError, "4"),
            (68, "-r 0:1,", ValueError, "0:1,"),
            (68, "-r ''", ValueError, None),
            (68, "-t 4", ValueError, "4"),
            (68, "-t 0:1,", ValueError, "0:1,"),
            (68, "-t ''", ValueError, None),
            (77, "--local-ranks-filter=0,x", ValueError, "local.ranks.filter"),
            (85, "--logs-specs=not_there", ValueError, "not_there"),
        ]
    ),
)
def test_values_that_cannot_be_are_refused(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, line: str, error: type[Exception], match: str | None
) -> None:
    variables, args = read(line)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(error, match=match):
        peer.parse(*args, *NOT_PRIVATE, "script.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "status", "words"),
    cases(
        [
            (6, "--nproc-per-node 2", 2, ["usage:"]),
            (7, "--no-such-option script.py", 2, ["--no-such-option"]),
            (9, "PET_MAX_RESTARTS=two script.py", 2, ["two"]),
            (12, "--start-method clone script.py", 2, ["clone", "spawn", "fork", "forkserver"]),
            (14, "--monitor-interval 0 script.py", None, []),
            (15, "--nproc-per-node 0 script.py", None, []),
            (109, "--shutdown-timeout=-1 script.py", None, ["-1"]),
        ]
    ),
)
def test_a_command_that_cannot_be_ends_before_a_worker_runs(
    peer: Peer, line: str, status: int | None, words: list[str]
) -> None:
    """Without a script, as with a bad option."""
    variables, args = read(line)
    peer.script("print('ran')")

    done = peer.run(*args, env=variables)

    assert done.returncode == status if status else done.returncode > 0
    assert "" == done.out
    assert [] == [word for word in words if word not in done.err]


@pytest.mark.row(4)
@pytest.mark.parametrize(
    ("option", "value", "read"),
    [
        ("nproc-per-node", "3", 3),
        ("rdzv-backend", "c10d", "c10d"),
        ("rdzv-id", "job", "job"),
        ("max-restarts", "2", 2),
        ("monitor-interval", "0.5", 0.5),
        ("start-method", "fork", "fork"),
        ("local-addr", "127.0.0.1", "127.0.0.1"),
        ("signals-to-handle", "SIGTERM", "SIGTERM"),
        ("shutdown-timeout", "7", 7),
        ("virtual-local-rank", None, True),
    ],
)
def test_an_option_may_be_spelled_with_dashes_or_underscores(
    peer: Peer, option: str, value: str | None, read: object
) -> None:
    field = {"rdzv-id": "run_id"}.get(option, option.replace("-", "_"))
    given = () if value is None else (value,)

    spellings = [f"--{option}", f"--{option.replace('-', '_')}"]
    found = [getattr(peer.parse(spelling, *given, *NOT_PRIVATE, "script.py")[0], field) for spelling in spellings]

    assert [read, read] == found


@pytest.mark.row(5)
@pytest.mark.slow
@pytest.mark.sampled
def test_arguments_after_the_script_are_passed_to_the_script(peer: Peer) -> None:
    args = ["--nnodes", "7", "--", "", "--standalone", "-m", "--tee=3"]

    done = peer.run("--nproc-per-node", "1", peer.script("import sys; print(sys.argv[1:])"), *args)

    assert [str(args)] == done.out.splitlines()


@pytest.mark.row(10)
@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False)])
def test_a_flags_variable_turns_it_on_or_off(peer: Peer, monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv("PET_STANDALONE", text)

    args = peer.module("run").parse_args(["script.py"])

    assert on is args.standalone


@pytest.mark.row(11)
def test_logs_specs_and_numa_binding_have_no_variables(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_LOGS_SPECS", "no such plug-in")
    monkeypatch.setenv("PET_NUMA_BINDING", "no such mode")

    config, _, _ = peer.parse(*NOT_PRIVATE, "script.py")

    assert "DefaultLogsSpecs" == type(config.logs_specs).__name__
    assert config.numa_options is None


@pytest.mark.row(16)
@pytest.mark.slow
def test_cpu_means_the_cpus_of_the_affinity_mask(peer: Peer) -> None:
    done = peer.python(
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from {distributed}.run import determine_local_world_size\n"
        "print(determine_local_world_size('cpu'))"
    )

    assert "1\n" == done.out
    assert len(os.sched_getaffinity(0)) == peer.module("run").determine_local_world_size("cpu")


@pytest.mark.row(17)
def test_gpu_without_cuda_is_a_value_error(peer: Peer) -> None:
    """Expect the number of devices instead if there is a GPU."""
    import torch

    count = peer.module("run").determine_local_world_size
    if torch.cuda.is_available():
        assert torch.cuda.device_count() == count("gpu")
    else:
        with pytest.raises(ValueError):
            count("gpu")


@pytest.mark.row(18)
def test_auto_means_the_accelerators_else_the_cpus(peer: Peer) -> None:
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0

    assert (devices or len(os.sched_getaffinity(0))) == peer.module("run").determine_local_world_size("auto")


@pytest.mark.row(19)
def test_unknown_nproc_text_raises_value_error_that_names_the_text(peer: Peer) -> None:
    with pytest.raises(ValueError, match="foo"):
        peer.module("run").determine_local_world_size("foo")


@pytest.mark.row(20)
@pytest.mark.slow
def test_help_lists_all_options(peer: Peer) -> None:
    done = peer.run("--help")

    assert 0 == done.returncode
    assert 30 == len(OPTIONS)
    assert set() == set(OPTIONS) - set(re.findall(r"--[a-z][a-z-]*", done.out))


@pytest.mark.slow
def test_every_option_of_torchrun_is_one_of_elasticrun(peer: Peer) -> None:
    """By torchrun's help and our parser, in every spelling that torchrun shows."""
    torchs = subprocess.run([*TORCHRUN.command, "--help"], capture_output=True, text=True, check=True).stdout
    options = set(re.findall(r"(?<![\w-])--?[a-z][a-z_-]*", torchs.partition("options:")[2]))
    mine = {text for action in peer.module("run").get_args_parser()._actions for text in action.option_strings}

    assert {"--nnodes", "-m", "--nproc_per_node", "--virtual-local-rank"} <= options
    assert set() == options - mine - PROSE


PROSE = {"--redirect"}
"""Texts in torchrun's explanations that look like options but are not."""
