"""Rows 001 to 020: how the command line is read."""

from __future__ import annotations

import os
import re
import subprocess

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


@pytest.mark.row(1)
@pytest.mark.parametrize(("text", "nodes"), [("3", (3, 3)), ("2:5", (2, 5))])
def test_nnodes_sets_the_least_and_the_most_number_of_nodes(peer: Peer, text: str, nodes: tuple[int, int]) -> None:
    config, _, _ = peer.parse("--nnodes", text, *NOT_PRIVATE, "script.py")

    assert nodes == (config.min_nodes, config.max_nodes)


@pytest.mark.row(2)
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1:2:3", RuntimeError),
        ("x", ValueError),
        ("0", AssertionError),
        ("0:1", AssertionError),
        ("3:2", AssertionError),
    ],
)
def test_a_bad_number_of_nodes_is_refused(peer: Peer, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        peer.parse("--nnodes", text, *NOT_PRIVATE, "script.py")


@pytest.mark.row(3)
def test_the_default_is_one_node_with_one_worker(peer: Peer) -> None:
    config, _, _ = peer.parse(*NOT_PRIVATE, "script.py")

    assert (1, 1, 1) == (config.min_nodes, config.max_nodes, config.nproc_per_node)


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
def test_what_stands_after_the_script_is_the_scripts(peer: Peer) -> None:
    args = ["--nnodes", "7", "--", "", "--standalone", "-m", "--tee=3"]

    done = peer.run("--nproc-per-node", "1", peer.script("import sys; print(sys.argv[1:])"), *args)

    assert [str(args)] == done.out.splitlines()


@pytest.mark.row(6)
@pytest.mark.slow
def test_a_missing_script_is_wrong_usage(peer: Peer) -> None:
    done = peer.run("--nproc-per-node", "2")

    assert (2, "") == (done.returncode, done.out)
    assert "usage:" in done.err


@pytest.mark.row(7)
@pytest.mark.slow
def test_an_unknown_option_before_the_script_is_wrong_usage(peer: Peer) -> None:
    done = peer.run("--no-such-option", peer.script("print('ran')"))

    assert (2, "") == (done.returncode, done.out)
    assert "--no-such-option" in done.err


@pytest.mark.row(8)
def test_a_variable_gives_the_default_and_the_command_line_wins(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    monkeypatch.setenv("PET_ROLE", "reader")

    config, _, _ = peer.parse("--role", "trainer", *NOT_PRIVATE, "script.py")

    assert (5, "trainer") == (config.max_restarts, config.role)


@pytest.mark.row(9)
@pytest.mark.parametrize(
    ("variable", "text", "value"), [("MAX_RESTARTS", "2", 2), ("MONITOR_INTERVAL", "0.25", 0.25), ("ROLE", "5", "5")]
)
def test_a_variables_text_is_converted(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, value: object
) -> None:
    monkeypatch.setenv(f"PET_{variable}", text)

    config, _, _ = peer.parse(*NOT_PRIVATE, "script.py")

    assert value == getattr(config, variable.lower())
    assert type(value) is type(getattr(config, variable.lower()))


@pytest.mark.row(9)
@pytest.mark.slow
def test_a_variables_bad_text_is_an_error(peer: Peer) -> None:
    done = peer.run(peer.script("print('ran')"), env={"PET_MAX_RESTARTS": "two"})

    assert (2, "") == (done.returncode, done.out)
    assert "two" in done.err


@pytest.mark.row(10)
@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False)])
def test_a_flags_variable_turns_it_on_or_off(peer: Peer, monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv("PET_STANDALONE", text)

    args = peer.module("run").parse_args(["script.py"])

    assert on is args.standalone


@pytest.mark.row(10)
@pytest.mark.parametrize("text", ["true", ""])
def test_a_flags_variable_must_be_a_number(peer: Peer, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PET_STANDALONE", text)

    with pytest.raises(ValueError):
        peer.module("run").parse_args(["script.py"])


@pytest.mark.row(11)
def test_logs_specs_and_numa_binding_have_no_variables(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_LOGS_SPECS", "no such plug-in")
    monkeypatch.setenv("PET_NUMA_BINDING", "no such mode")

    config, _, _ = peer.parse(*NOT_PRIVATE, "script.py")

    assert "DefaultLogsSpecs" == type(config.logs_specs).__name__
    assert config.numa_options is None


@pytest.mark.row(12)
@pytest.mark.slow
def test_an_unknown_start_method_is_refused_with_the_known_ones(peer: Peer) -> None:
    done = peer.run("--start-method", "clone", peer.script("print('ran')"))

    assert (2, "") == (done.returncode, done.out)
    assert all(name in done.err for name in ("clone", "spawn", "fork", "forkserver"))


@pytest.mark.row(12)
@pytest.mark.parametrize("name", ["spawn", "fork", "forkserver"])
def test_the_known_start_methods_are_taken(peer: Peer, name: str) -> None:
    assert name == peer.parse("--start-method", name, *NOT_PRIVATE, "script.py")[0].start_method


@pytest.mark.row(13)
def test_a_negative_number_of_restarts_is_refused(peer: Peer) -> None:
    with pytest.raises(AssertionError, match=r"max_restarts|max-restarts"):
        peer.parse("--max-restarts=-1", *NOT_PRIVATE, "script.py")


@pytest.mark.row(14)
@pytest.mark.slow
def test_a_monitor_interval_of_zero_is_refused(peer: Peer) -> None:
    done = peer.run("--monitor-interval", "0", peer.script("print('ran')"))

    assert done.returncode not in (0, -11)
    assert "" == done.out


@pytest.mark.row(15)
@pytest.mark.slow
def test_no_workers_at_all_are_refused(peer: Peer) -> None:
    done = peer.run("--nproc-per-node", "0", peer.script("print('ran')"))

    assert 0 != done.returncode
    assert "" == done.out


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
    """Where there is a GPU it is the number of devices."""
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
def test_an_unknown_word_for_the_workers_is_a_value_error_that_names_it(peer: Peer) -> None:
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
"""What reads like an option in torchrun's explanations and is none."""
