"""Requests of a command line and ``PET_*`` variables, without starting anything."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

import elasticlib.launch
import elasticlib.run
from elasticlib.cli._option_table import OPTIONS, Option
from elasticlib.cli._request import Script, request_of
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    LaunchInterrupted,
    ProcessFailure,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    SignalException,
    StartError,
)
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.run import get_args_parser, main, parse_args, run
from elasticlib.spec import Entrypoint, LaunchConfig, Std
from tests.unit.engines import recorded

ROWS = [option for rows in OPTIONS.values() for option in rows]


@define
class Launches:
    """Stands in for `elastic_launch`: keeps what it was called with, and raises *fails* if that is set."""

    calls: list[tuple[LaunchConfig, Entrypoint, tuple[Any, ...]]] = field(factory=list)
    fails: BaseException | None = None

    def __call__(self, config: LaunchConfig, entrypoint: Entrypoint) -> Callable[..., dict[int, Any]]:
        def run(*args: Any) -> dict[int, Any]:
            self.calls.append((config, entrypoint, args))
            if self.fails:
                raise self.fails
            return {}

        return run

    @property
    def config(self) -> LaunchConfig:
        return self.calls[-1][0]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    for name in list(os.environ):
        if name.startswith("PET_") or name in ("LOGLEVEL", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"):
            monkeypatch.delenv(name)
    fake = Launches()
    monkeypatch.setattr(elasticlib.launch, "elastic_launch", fake)
    return fake


def as_program(*args: str, command: Callable[[], None] = main) -> object:
    """The status with which the program ends when it is called with *args*."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", ["elasticrun", *args])
        patch.setattr(signal, "signal", lambda *_: None)  # a program that ends may stop listening; this one goes on
        command()
    return caught.value.code


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The last line that a wrong call leaves on stderr; it must exit with status 2."""
    assert 2 == as_program(*args)
    return capsys.readouterr().err.splitlines()[-1]


def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert 0 == caught.value.code
    return capsys.readouterr().out


def test_defaults_are_torchruns_but_for_the_start_method(launches: Launches) -> None:
    """Row 003."""
    main(["train.py"])

    config, entrypoint, args = launches.calls[0]
    assert (1, 1, 1) == (config.min_nodes, config.max_nodes, config.nproc_per_node)
    assert (0, 0.1, "default") == (config.max_restarts, config.monitor_interval, config.role)
    assert ("forkserver", ("auto",), None) == (config.start_method, config.preload, config.shutdown_timeout)
    assert (
        DefaultLogsSpecs(log_dir=None, redirects=Std.NONE, tee=Std.NONE, local_ranks_filter=None) == config.logs_specs
    )
    assert (Script("train.py"), ()) == (entrypoint, args)


def test_every_option_of_one_node_reaches_the_config(launches: Launches) -> None:
    main(
        "--nnodes 1 --nproc-per-node 3 --start-method spawn --role trainer --max-restarts 2 --monitor-interval 0.5 "
        "--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 7 --exit-timeout 2.5 --log-dir /logs "
        "--redirects 0:1,1:3 --tee 2 "
        "--local-ranks-filter 0,2 --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id job7 "
        "--local-addr 10.0.0.7 train.py".split()
    )

    config = launches.config
    assert (3, "spawn", "trainer", 2, 0.5) == (
        config.nproc_per_node,
        config.start_method,
        config.role,
        config.max_restarts,
        config.monitor_interval,
    )
    assert ("SIGTERM,SIGUSR1", 7, "job7") == (config.signals_to_handle, config.shutdown_timeout, config.run_id)
    assert 2.5 == config.exit_timeout
    assert ("c10d", "localhost:0", "10.0.0.7") == (config.rdzv_backend, config.rdzv_endpoint, config.local_addr)
    assert config.logs_specs == DefaultLogsSpecs(
        log_dir="/logs", redirects={0: Std.OUT, 1: Std.ALL}, tee=Std.ERR, local_ranks_filter=[0, 2]
    )


@pytest.mark.parametrize("text", ["1", "1:1"])
def test_one_node_may_be_a_number_or_a_range(launches: Launches, text: str) -> None:
    """Row 001."""
    main(["--nnodes", text, "train.py"])

    assert (1, 1) == (launches.config.min_nodes, launches.config.max_nodes)


@pytest.mark.parametrize("text", ["1:2:3", "x", "", "0", "0:1", "3:2", "1:", "-1"])
def test_a_wrong_number_of_nodes_is_refused(launches: Launches, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Row 002."""
    message = refusal(capsys, f"--nnodes={text}", "train.py")

    assert message.startswith("elasticrun: error: ")
    assert "nodes" in message
    assert not launches.calls


EXAMPLES = {
    "nnodes": "1:1",
    "nproc_per_node": "2",
    "start_method": "spawn",
    "preload": "json",
    "max_restarts": "4",
    "monitor_interval": "0.7",
    "shutdown_timeout": "9",
    "exit_timeout": "2.5",
    "redirects": "3",
    "tee": "1",
    "local_ranks_filter": "0",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:0",
    "engine": "none",
    "preempt_exit": "3",
    "failure_exit": "93",
    "termination_log": "/tmp/end",
    "requeue": "0",
    "preempt_signal": "USR1",
    "preempt_notice": "/run/notice",
    "end_time": "99999999999.0",
    "rdzv_conf": "join_timeout=3",
    "wait_for": "max",
    "node_rank": "0",
    "event_log_handler": "console",
    "duplicate_stdout_filters": "loss,,,error",
    "logs_specs": "default",
    "numa_binding": "core-complex",
    "master_addr": "127.0.0.1",
    "master_port": "29511",
}
VALUED = [row for row in ROWS if not row.is_flag]


def launched_with(launches: Launches, *args: str) -> tuple[Any, ...]:
    """All that the launch got, but for the run id, which may be random."""
    main(args)
    config, entrypoint, script_args = launches.calls[-1]
    config.run_id = "" if len(config.run_id) == 36 else config.run_id
    return config, entrypoint, script_args


@pytest.mark.parametrize("row", VALUED, ids=lambda row: row.dest)
def test_each_option_may_be_spelled_with_underscores(launches: Launches, row: Option) -> None:
    """Row 004."""
    value = EXAMPLES.get(row.dest, "x")

    dashes = launched_with(launches, row.long, value, "train.py")
    underscores = launched_with(launches, f"--{row.dest}", value, "train.py")
    with_equals = launched_with(launches, f"--{row.dest}={value}", "train.py")

    assert dashes == underscores == with_equals


@pytest.mark.parametrize("flag", ["--no-python", "--no_python", "--no-p", "--no_p"])
def test_each_flag_may_be_spelled_with_underscores(launches: Launches, flag: str) -> None:
    """Row 004."""
    main([flag, "prog"])

    assert launches.config.no_python


@pytest.mark.parametrize("text", ["--nproc", "--nproc_per", "--nproc-per-nod"])
def test_an_abbreviation_is_not_made_ambiguous_by_the_second_spelling(launches: Launches, text: str) -> None:
    main([text, "2", "train.py"])

    assert 2 == launches.config.nproc_per_node


def test_an_abbreviation_of_two_options_is_refused(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--m", "3", "train.py")

    assert "ambiguous" in message


@pytest.mark.parametrize(
    "args",
    [
        ["--tee", "3", "--nproc_per_node=8", "-m"],
        ["a", "--", "b", "--"],
        ["", " ", "-", "--"],
        ["--lr", "-1", "--standalone", "-h"],
        ["pa$$word", "--a_b", "--a-b=c_d"],
    ],
)
def test_arguments_after_the_script_are_passed_unchanged(launches: Launches, args: list[str]) -> None:
    """Row 005."""
    main(["--max-restarts", "1", "train.py", *args])

    assert (Script("train.py"), tuple(args)) == launches.calls[0][1:]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["train.py", "--", "x"], ("x",)),
        (["train.py", "--", "--", "x"], ("--", "x")),
        (["--", "train.py", "--", "x"], ("--", "x")),
        (["train.py", "--"], ()),
    ],
)
def test_two_dashes_right_behind_the_script_are_dropped_once(
    launches: Launches, args: list[str], expected: tuple[str, ...]
) -> None:
    """As argparse does it for torchrun: there they stand for the end of the options too."""
    main(args)

    assert (Script("train.py"), expected) == launches.calls[0][1:]


def test_two_dashes_before_the_script_end_the_launchers_options(launches: Launches) -> None:
    main(["--tee", "3", "--", "--odd-name.py", "--", "x"])

    assert (Script("--odd-name.py"), ("--", "x")) == launches.calls[0][1:]


def test_a_value_stuck_to_a_short_option_is_not_taken_for_the_script(launches: Launches) -> None:
    main(["-t3", "-r", "1", "-m", "pkg.mod", "-r", "2"])

    assert ("pkg.mod", ("-r", "2")) == launches.calls[0][1:]
    assert DefaultLogsSpecs(redirects=Std.OUT, tee=Std.ALL) == launches.config.logs_specs


@pytest.mark.parametrize("args", [[], ["--tee", "3"], ["--"], ["--tee"]])
def test_a_call_without_a_script_is_wrong_usage(
    launches: Launches, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    """Row 006."""
    message = refusal(capsys, *args)

    assert message.startswith("elasticrun: error: ")


@pytest.mark.parametrize("option", ["--bogus", "--token"])
def test_an_unknown_option_before_the_script_is_wrong_usage(
    launches: Launches, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """Row 007; a token is not read from the command line, which shows in ps."""
    message = refusal(capsys, option, "train.py")

    assert option in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("-n", "2"), "--nproc-per-node 2"),
        (("-np", "2"), "--nproc-per-node 2"),
        (("--num_processes=2",), "--nproc-per-node 2"),
        (("--nproc-pernode", "2"), "--nproc-per-node 2"),
        (("-N", "2"), "--nnodes 2"),
        (("--max-retarts", "3"), "--max-restarts 3"),
        (("--standalon3",), "--standalone"),
        (("--nprocs",), "--nproc-per-node"),
    ],
)
def test_refusal_of_an_unknown_option_suggests_the_nearest(
    launches: Launches, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], meant: str
) -> None:
    message = refusal(capsys, *given, "train.py")

    assert message.endswith(f"unrecognized arguments: {given[0]}; did you mean {meant}?")


def test_unknown_options_are_returned_to_who_asks_for_them() -> None:
    _, unknown = get_args_parser().parse_known_args(["-n", "train.py"])

    assert ["-n"] == unknown


def test_the_environment_gives_the_default_and_the_command_line_wins(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 008 and 009."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")

    main(["--nproc-per-node", "4", "train.py"])

    assert (2, 4) == (launches.config.max_restarts, launches.config.nproc_per_node)


@pytest.mark.parametrize("row", [row for row in VALUED if row.environment], ids=lambda row: row.dest)
def test_each_option_has_its_variable(launches: Launches, monkeypatch: pytest.MonkeyPatch, row: Option) -> None:
    """Row 008."""
    value = EXAMPLES.get(row.dest, "x")
    typed = launched_with(launches, row.long, value, "train.py")
    monkeypatch.setenv(f"PET_{row.dest.upper()}", value)

    assert typed == launched_with(launches, "train.py")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PET_MAX_RESTARTS", "two"),
        ("PET_MAX_RESTARTS", ""),
        ("PET_MONITOR_INTERVAL", "fast"),
        ("PET_STANDALONE", "true"),
        ("PET_STANDALONE", ""),
        ("PET_TEE", "4"),
        ("PET_LOCAL_RANKS_FILTER", "a,b"),
        ("PET_NNODES", "many"),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused_by_name(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """Rows 009 and 010."""
    monkeypatch.setenv(name, text)

    message = refusal(capsys, "train.py")

    assert message.startswith(f"elasticrun: error: {name}: ")
    assert repr(text) in message


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("0", False)])
def test_a_flags_variable_turns_it_on_or_off(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    """Row 010."""
    monkeypatch.setenv("PET_NO_PYTHON", text)

    main(["train.py"])

    assert expected == launches.config.no_python


@pytest.mark.parametrize("columns", [60, 160])
def test_help_is_as_wide_as_the_terminal(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))

    assert columns - 10 <= max(map(len, help_text(capsys).splitlines())) <= columns


def test_help_is_printed_whatever_the_variables_contain(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "true")

    assert help_text(capsys).startswith("usage: elasticrun ")


def test_logs_specs_and_numa_binding_read_no_variable(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 011."""
    monkeypatch.setenv("PET_LOGS_SPECS", "other")
    monkeypatch.setenv("PET_NUMA_BINDING", "node")

    main(["train.py"])

    assert 1 == len(launches.calls)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--start-method", "bogus"], "bogus"),
        (["--max-restarts", "-1"], "-1"),
        (["--monitor-interval", "0"], "0"),
        (["--monitor-interval", "nan"], "nan"),
        (["--nproc-per-node", "0"], "0"),
        (["--nproc-per-node", "-2"], "-2"),
        (["--nproc-per-node", "2 gpus"], "'2 gpus'"),
        (["--shutdown-timeout", "-1"], "-1"),
        (["--shutdown-timeout", "soon"], "'soon'"),
        (["--exit-timeout", "-1"], "exit-timeout"),
        (["--exit-timeout", "soon"], "'soon'"),
        (["--redirects", "4"], "'4'"),
        (["--redirects", "0:1,"], "'0:1,'"),
        (["--tee", ""], "''"),
        (["--local-ranks-filter", "a"], "'a'"),
        (["--no-python", "--module"], "--no-python"),
        (["--preload", "numpy", "--start-method", "spawn"], "--preload"),
        (["--preload", "numpy", "--no-python"], "--preload"),
        (["--numa-binding", "near"], "--numa-binding='near'"),
        (["--numa-binding", "near"], "core-complex"),
        (["--standalone", "--nnodes", "2"], "--standalone and --nnodes cannot be combined"),
        (["--standalone", "--nnodes=2:4"], "--standalone and --nnodes cannot be combined"),
        (["--node-rank", "-1", "--nnodes", "2"], "--node-rank=-1"),
        (["--node-rank", "two", "--nnodes", "2"], "--node-rank: 'two'"),
        (["--master-port", "70000"], "--master-port=70000"),
        (["--master-port", "-1"], "--master-port=-1"),
        (["--rdzv-conf", "join_timeout"], "--rdzv-conf: 'join_timeout' gives join_timeout no value"),
        (["--rdzv-conf", "=3"], "--rdzv-conf: '=3' must be comma-separated KEY=VALUE pairs"),
        (["--wait-for", "all"], "--wait-for='all' is unknown: give one of quiet, min, max"),
        (["--local-addr", "a\0b"], "--local-addr"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused(
    launches: Launches, capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    """Rows 012 to 015, 019, 029, 033, 039, 068, 077 and 109."""
    message = refusal(capsys, *args, "train.py")

    assert message.startswith("elasticrun: error: ")
    assert named in message
    assert not launches.calls


def test_an_unknown_start_method_of_the_environment_is_ignored_aloud(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun reads it for functions alone, and checks the option only."""
    monkeypatch.setenv("PET_START_METHOD", "bogus")

    main(["train.py"])

    assert "forkserver" == launches.config.start_method
    assert "PET_START_METHOD='bogus' is unknown and ignored" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["cpu", "gpu", "xpu", "auto"])
def test_text_for_the_number_of_workers_is_left_to_the_launch(launches: Launches, text: str) -> None:
    main(["--nproc-per-node", text, "train.py"])

    assert text == launches.config.nproc_per_node


def test_ranks_of_two_digits_may_be_mapped(launches: Launches) -> None:
    """Row 069."""
    main(["--tee", "3:1,12:3", "train.py"])

    assert DefaultLogsSpecs(tee={3: Std.OUT, 12: Std.ALL}) == launches.config.logs_specs


DEFAULTS = {
    "--nnodes": "1:1",
    "--nproc-per-node": "1",
    "--rdzv-backend": "static",
    "--rdzv-endpoint": "none",
    "--rdzv-id": "none",
    "--rdzv-conf": "none",
    "--wait-for": "quiet",
    "--standalone": "off",
    "--max-restarts": "0",
    "--monitor-interval": "0.1",
    "--start-method": "forkserver",
    "--event-log-handler": "null",
    "--role": "default",
    "--module": "off",
    "--no-python": "off",
    "--run-path": "off",
    "--log-dir": "a temporary one",
    "--redirects": "0",
    "--tee": "0",
    "--local-ranks-filter": "all",
    "--duplicate-stdout-filters": "none",
    "--duplicate-stderr-filters": "none",
    "--progress": "off",
    "--node-rank": "0",
    "--master-addr": "127.0.0.1",
    "--master-port": "29500; a free port for a job of one node",
    "--local-addr": "detected",
    "--logs-specs": "default",
    "--worker-server": "off",
    "--numa-binding": "none",
    "--signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "--shutdown-timeout": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30",
    "--exit-timeout": "30 after a failure; no limit after success",
    "--log-line-prefix-template": "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else [${role_name}${local_rank}]:",
    "--virtual-local-rank": "off",
    "--preload": "auto",
    "--engine": "auto",
    "--preempt-exit": "75",
    "--failure-exit": "1",
    "--termination-log": "/dev/termination-log if it exists, as in a pod; else none",
    "--requeue": "0",
    "--preempt-signal": "in a Slurm step SIGTERM,SIGUSR1,SIGUSR2; in a pod SIGTERM; else none",
    "--preempt-notice": "none",
    "--end-time": "that of the Slurm job",
}


def test_help_lists_every_option_and_its_default(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 020: torchrun's 30 options and our own."""
    text = " ".join(help_text(capsys).split())
    found = {
        long: re.search(rf" {long}\b.*?\(default: (.*?)\)", text) for long in {*DEFAULTS, *(row.long for row in ROWS)}
    }
    assert DEFAULTS == {long: match[1] if match else "not listed" for long, match in found.items()}


def test_a_plain_run_gets_a_fresh_job_id(launches: Launches) -> None:
    """Row 021."""
    main(["train.py"])
    main(["train.py"])

    first, second = (config for config, _, _ in launches.calls)
    assert 36 == len(first.run_id)
    assert first.run_id != second.run_id
    assert ("c10d", "") == (first.rdzv_backend, first.rdzv_endpoint)


def test_standalone_overrides_backend_endpoint_and_id(launches: Launches) -> None:
    """Row 022."""
    main(
        "--standalone --rdzv-backend etcd --rdzv-endpoint host:1 --rdzv-id job7 --rdzv-conf protocol=https "
        "--node-rank 3 --master-port 1 train.py".split()
    )

    config = launches.config
    assert ("c10d", "", {"timeout": 900}) == (config.rdzv_backend, config.rdzv_endpoint, config.rdzv_configs)
    assert config.node_rank is None
    assert 36 == len(config.run_id)


@pytest.mark.parametrize(
    ("text", "filters"),
    [
        ("loss", ["loss"]),
        ("loss,error", ["loss", "error"]),
        ("a,,b,c", ["a,b", "c"]),
        (",,", [","]),
        ("a, b", ["a", " b"]),
        ("", None),
        (",", None),
    ],
)
def test_filters_are_parts_between_commas_and_two_commas_are_one(
    launches: Launches, text: str, filters: list[str] | None
) -> None:
    main(["--duplicate-stdout-filters", text, "train.py"])

    assert filters == launches.config.duplicate_stdout_filters
    assert launches.config.duplicate_stderr_filters is None


def test_a_namespace_serves_programs_that_build_upon_torchs_parser() -> None:
    """Accelerate and others parse, change what they like, and run it."""
    args = get_args_parser().parse_args(["--nnodes", "1:2", "--rdzv_endpoint=h:1", "--tee", "3", "x.py", "--lr", "1"])

    assert ("1:2", "h:1", "3", "0", "1") == (
        args.nnodes,
        args.rdzv_endpoint,
        args.tee,
        args.redirects,
        args.nproc_per_node,
    )
    assert ("x.py", ["--lr", "1"], False, 0, 0.1) == (
        args.training_script,
        args.training_script_args,
        args.module,
        args.max_restarts,
        args.monitor_interval,
    )


def test_launch_uses_what_a_program_sets_in_the_namespace(launches: Launches) -> None:
    args = parse_args(["x.py"])
    args.nproc_per_node, args.max_restarts, args.module, args.training_script = "3", 2, True, "pkg.mod"
    args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "h:1", "job"

    run(args)

    assert (3, 2, True) == (launches.config.nproc_per_node, launches.config.max_restarts, launches.config.module)
    assert ("c10d", "h:1", "job") == (
        launches.config.rdzv_backend,
        launches.config.rdzv_endpoint,
        launches.config.run_id,
    )
    assert "pkg.mod" == launches.calls[-1][1]


def test_the_smaller_names_of_torchs_module_do_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.setattr(sys, "argv", ["before"])
    args = parse_args(["--nnodes", "2", "--master-addr", "node0", "--master-port", "7", "x.py"])

    elasticlib.run.run_script_path(str(script), "a")

    assert "__main__ ['a']\n" == capsys.readouterr().out
    assert "node0:7" == elasticlib.run.get_rdzv_endpoint(args)
    assert "h:1" == elasticlib.run.get_rdzv_endpoint(parse_args(["--rdzv-endpoint", "h:1", "x.py"]))
    assert elasticlib.run.get_use_env(args)


@pytest.mark.parametrize(
    ("settings", "arguments", "value"),
    [
        ({}, ["--mine", "3"], "3"),
        ({}, ["--mine=3"], "3"),
        ({}, ["--min", "3"], "3"),
        ({"nargs": 2}, ["--mine", "3", "4"], ["3", "4"]),
        ({"nargs": "?", "const": "c"}, ["--mine", "--nproc", "1"], "c"),
        ({"nargs": "*"}, ["--mine", "3", "4", "--nproc", "1"], ["3", "4"]),
        ({"action": "store_true"}, ["--mine"], True),
    ],
)
@pytest.mark.parametrize("in_group", [False, True])
def test_an_added_option_takes_what_argparse_gives_it(
    settings: dict[str, Any], arguments: list[str], value: object, in_group: bool
) -> None:
    parser = get_args_parser()
    (parser.add_argument_group("mine") if in_group else parser).add_argument("--mine", **settings)

    args = parser.parse_args([*arguments, "--nnodes", "2", "x.py", "--mine", "8"])

    assert (value, "2", "x.py", ["--mine", "8"]) == (
        args.mine,
        args.nnodes,
        args.training_script,
        args.training_script_args,
    )


def test_another_parser_may_inherit_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    parser = argparse.ArgumentParser(parents=[get_args_parser()], conflict_handler="resolve")

    args = parser.parse_args(["--nproc_per_node", "2", "--standalone", "x.py", "--lr", "1"])

    assert ("2", True, 5, "0", "x.py", ["--lr", "1"]) == (
        args.nproc_per_node,
        args.standalone,
        args.max_restarts,
        args.tee,
        args.training_script,
        args.training_script_args,
    )


def test_standalone_waits_for_no_other_node(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    """Row 209: a range is taken for its one node, with a warning."""
    main(["--standalone", "--nnodes", "1:3", "train.py"])

    assert (1, 1) == (launches.config.min_nodes, launches.config.max_nodes)
    assert ["--standalone: this job runs on one node only; the maximum of --nnodes=1:3 is ignored"] == caplog.messages


def test_standalone_names_what_has_no_effect_beside_it(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    main(["--standalone", "--rdzv-id", "mine", "--node_rank", "3", "train.py"])

    assert [
        "--standalone: this job runs on this node only, so these have no effect: --rdzv-id, --node-rank"
    ] == caplog.messages


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Return a function that gives this process an engine's variables."""

    def use(environ: Mapping[str, str]) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    for name in (*recorded.STEP, *recorded.PTY, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("elasticlib.cli._request.reachable", str)
    return use


FIRST = {**recorded.STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "0"}


def test_a_step_of_slurm_needs_no_option(
    launches: Launches, engine: Callable[[Mapping[str, str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(FIRST)

    main(["train.py"])

    config = launches.config
    assert (4, 4, "c10d") == (config.min_nodes, config.max_nodes, config.rdzv_backend)
    assert ("n1:20061", "1.0.0", True) == (config.rdzv_endpoint, config.run_id, config.rdzv_configs["is_host"])
    stderr = capsys.readouterr().err
    assert 1 == stderr.count("\n") and "Slurm step 1.0: 4 nodes, endpoint n1:20061, id 1.0.0" in stderr


def test_only_one_node_of_a_step_prints_the_filled_in_options(
    launches: Launches, engine: Callable[[Mapping[str, str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(recorded.STEP)

    main(["train.py"])

    assert 4 == launches.config.max_nodes
    assert "" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "options"),
    [
        (FIRST, ["--standalone"]),
        (FIRST, ["--engine", "none"]),
        (FIRST, ["--nnodes=1"]),
        ({**FIRST, "TORCHELASTIC_RUN_ID": "none"}, []),
        (recorded.PTY, []),
        (recorded.BATCH, []),
    ],
)
def test_a_job_of_one_node_stays_one(
    launches: Launches, engine: Callable[[Mapping[str, str]], None], environ: dict[str, str], options: list[str]
) -> None:
    engine(environ)

    main([*options, "train.py"])

    assert (1, 1, "") == (launches.config.min_nodes, launches.config.max_nodes, launches.config.rdzv_endpoint)


def test_a_terminal_of_several_nodes_warns_that_each_trains_alone(
    launches: Launches, engine: Callable[[Mapping[str, str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    engine(recorded.PTY)

    main(["train.py"])

    assert ["2 separate jobs" in line and "--engine slurm" in line for line in caplog.messages] == [True]


def test_an_error_names_the_variable_that_gave_the_value(
    launches: Launches, engine: Callable[[Mapping[str, str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine({**FIRST, "SLURM_STEP_NUM_NODES": "3"})

    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_NODES=3, but SLURM_STEP_NODELIST names 4 hosts"):
        main(["train.py"])


@pytest.mark.parametrize("options", [[], ["--standalone"]])
def test_the_only_task_of_a_step_can_be_requeued(options: list[str]) -> None:
    environ = {**recorded.ONE_NODE, "SLURM_RESTART_COUNT": "1"}

    request = request_of(parse_args([*options, "--requeue", "2", "train.py"]), environ)

    engine = request.exits.engine
    assert 2 == request.exits.requeue and engine is not None and 1 == engine.restart_count
    assert (1, "") == (request.config.max_nodes, request.config.rdzv_endpoint)


@pytest.mark.parametrize(
    ("environ", "options", "why"),
    [
        ({}, [], "this process is not in a step of Slurm"),
        ({}, ["--standalone"], "this process is not in a step of Slurm"),
        (recorded.BATCH, ["--standalone"], "this process is not in a step of Slurm"),
        ({"JOB_COMPLETION_INDEX": "0"}, [], "this process is not in a step of Slurm"),
        (FIRST, ["--standalone"], r"Slurm step 1.0 has 4 tasks.*--standalone.*give one task"),
        (FIRST, ["--nnodes", "1"], r"Slurm step 1.0 has 4 tasks.*--nnodes 1.*give one task"),
        (recorded.ONE_NODE, ["--engine", "none"], "--engine none ignores Slurm"),
        (recorded.ONE_NODE, ["--standalone", "--engine", "none"], "--engine none ignores Slurm"),
        ({**recorded.ONE_NODE, "TORCHELASTIC_RUN_ID": "x"}, [], "a worker of another launcher"),
        (recorded.PTY, ["--standalone"], "a terminal of srun --pty"),
        (recorded.INTERACTIVE, [], "srun has not started this process"),
    ],
)
def test_error_states_why_no_job_can_be_requeued(environ: dict[str, str], options: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=f"--requeue 1: .*{why}"):
        request_of(parse_args([*options, "--requeue", "1", "train.py"]), environ)


def test_an_unknown_engine_is_refused(launches: Launches) -> None:
    with pytest.raises(ConfigError, match=r"--engine='pbs' is unknown.*slurm"):
        main(["--engine", "pbs", "train.py"])


def test_a_master_that_a_program_set_is_not_called_missing(
    launches: Launches, caplog: pytest.LogCaptureFixture
) -> None:
    args = parse_args(["--nnodes", "2", "x.py"])
    args.master_addr = "node0"

    run(args)

    assert "node0:29500" == launches.config.rdzv_endpoint
    assert [] == caplog.messages


def test_configuration_of_a_namespace_has_a_number_and_a_text() -> None:
    config, entry, rest = elasticlib.run.config_from_args(parse_args(["--nproc-per-node", "cpu", "x.py", "a"]))

    assert len(os.sched_getaffinity(0)) == config.nproc_per_node
    assert ("x.py", ["a"]) == (entry, rest)


def test_a_configuration_has_no_place_for_rows_at_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    config, _, _ = elasticlib.run.config_from_args(parse_args(["--progress", "--nproc-per-node", "1", "x.py"]))

    assert [record.getMessage() for record in caplog.records] == [
        "no effect: --progress (only the command elasticrun can show it)"
    ]
    assert Std.NONE == config.logs_specs._redirects


@pytest.mark.parametrize(("use_env", "first"), [([], ("--local-rank=${local_rank}",)), (["--use_env"], ())])
def test_legacy_command_passes_the_local_rank_unless_use_env_is_given(
    launches: Launches, use_env: list[str], first: tuple[str, ...]
) -> None:
    """Row 044."""
    with pytest.warns(FutureWarning, match="deprecated"):
        elasticlib.launch.main([*use_env, "--nproc-per-node", "2", "train.py", "--lr", "1"])

    assert (*first, "--lr", "1") == launches.calls[-1][2]


def test_the_legacy_command_gives_no_local_rank_to_a_program(
    launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 045."""
    with pytest.warns(FutureWarning, match="deprecated"):
        assert 2 == as_program("--no-python", "true", command=elasticlib.launch.main)

    assert "--use-env" in capsys.readouterr().err
    assert not launches.calls


def test_a_program_may_replace_what_the_legacy_command_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its public name, as in torch's module."""
    launched: list[str] = []
    monkeypatch.setattr(elasticlib.launch, "launch", lambda args: launched.append(args.training_script))
    with pytest.warns(FutureWarning, match="deprecated"):
        elasticlib.launch.main(["train.py"])

    assert launched == ["train.py"]


STATIC = "--nnodes 2 --node-rank 1 --master-addr node0"


@pytest.mark.parametrize(
    ("options", "backend", "endpoint", "rank"),
    [
        ("", "c10d", "", None),
        ("--master-port 29511", "static", "127.0.0.1:29511", 0),
        ("--nnodes 2 --master-addr node0", "static", "node0:29500", 0),
        (STATIC, "static", "node0:29500", 1),
        (f"{STATIC} --master-port 1234", "static", "node0:1234", 1),
        ("--nnodes 2 --master-addr fe80::1", "static", "[fe80::1]:29500", 0),
        ("--nnodes 2 --master-addr [fe80::1] --node-rank 1", "static", "[fe80::1]:29500", 1),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint node0:7", "static", "node0:7", 1),
        ("--nnodes 2 --rdzv-endpoint node0:7 --master-addr node0 --master-port 7", "static", "node0:7", 0),
        ("--nnodes 2 --rdzv-endpoint node0:7 --master-port 7", "static", "node0:7", 0),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint node0", "c10d", "node0", None),
        ("--nnodes 1:4 --rdzv-backend etcd-v3 --rdzv-endpoint e1:2379", "etcd-v3", "e1:2379", None),
        ("--rdzv-backend mine --rdzv-endpoint x", "mine", "x", None),
    ],
)
def test_options_select_where_the_nodes_meet(
    launches: Launches, options: str, backend: str, endpoint: str, rank: int | None
) -> None:
    """Rows 021 and 023 to 025."""
    main([*options.split(), "train.py"])

    config = launches.config
    assert (backend, endpoint, rank) == (config.rdzv_backend, config.rdzv_endpoint, config.node_rank)


def test_nodes_conf_and_waiting_reach_the_config(launches: Launches) -> None:
    """Rows 001 and 028."""
    options = "--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id job7 --wait-for max"
    main([*options.split(), "--rdzv-conf", " join_timeout = 5, is_host=1 ", "train.py"])

    config = launches.config
    assert (2, 4, "job7", "max") == (config.min_nodes, config.max_nodes, config.run_id, config.wait_for)
    assert {"join_timeout": "5", "is_host": "1", "timeout": 900} == config.rdzv_configs


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--rdzv-backend c10d --node-rank 1", "--node-rank is ignored"),
        ("--rdzv-backend c10d --master-addr node0", "--master-addr is ignored"),
        ("--rdzv-backend etcd --rdzv-endpoint e1 --master-port 29500", "--master-port is ignored"),
        ("--nnodes 2 --node-rank 1", "--master-addr is not given: only nodes on this machine"),
        ("--node-rank 1", "--node-rank is ignored: the only node of this job has rank 0"),
        ("--nnodes 2 --rdzv-endpoint a:1 --master-addr b", "--master-addr 'b' is ignored: --rdzv-endpoint 'a:1'"),
        ("--nnodes 2 --rdzv-endpoint a:1 --master-port 70000", "--master-port 70000 is ignored"),
    ],
)
def test_an_option_without_effect_is_ignored_aloud(
    launches: Launches, capsys: pytest.CaptureFixture[str], options: str, named: str
) -> None:
    """Row 027."""
    main([*options.split(), "train.py"])

    assert named in capsys.readouterr().err
    assert 1 == len(launches.calls)


@pytest.mark.parametrize("options", ["--rdzv-backend c10d --node-rank 0", STATIC, "--master-port 29511", ""])
def test_an_option_with_its_effect_is_not_talked_about(
    launches: Launches, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    main([*options.split(), "train.py"])

    assert "" == capsys.readouterr().err


def test_help_states_where_a_token_is_read_from(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    assert "variable ELASTICLIB_TOKEN" in " ".join(help_text(capsys).split())


def test_node_replaced_after_its_script_was_done_exits_with_0(
    launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job ended well, and there are no results of a script that could be missed."""
    launches.fails = RendezvousGracefulExitError("the results of round 0 do not count")

    status = as_program("train.py")

    assert (0, "elasticrun: the results of round 0 do not count\n") == (status, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            ConfigError.of_setting("rdzv_endpoint", "'x:y' is not an endpoint"),
            "--rdzv-endpoint='x:y' is not an endpoint",
        ),
        (ConfigError.of_setting("rdzv_configs", "{'a': '1'}: unknown"), "--rdzv-conf={'a': '1'}: unknown"),
        (ConfigError.of_setting("run_id", "'': no"), "run_id='': no"),
        (ConfigError("rdzv_endpoint='x:y' says a sentence"), "rdzv_endpoint='x:y' says a sentence"),
    ],
)
def test_option_refused_by_the_launch_is_named_as_it_was_given(
    launches: Launches, capsys: pytest.CaptureFixture[str], error: ConfigError, shown: str
) -> None:
    launches.fails = error

    message = refusal(capsys, "--rdzv-endpoint", "x:y", "--rdzv-conf", "a=1", "train.py")

    assert f"elasticrun: error: {shown}" == message


@pytest.mark.parametrize(
    ("args", "entrypoint", "module", "no_python"),
    [
        ([], Script("x"), False, False),
        (["-m"], "x", True, False),
        (["--no-python"], "x", False, True),
        (["--run-path"], Script("x"), False, False),
        (["--run-path", "--no-python"], Script("x"), False, False),
        (["--run-path", "-m", "--no-python"], Script("x"), False, False),
    ],
)
def test_the_script_is_a_file_a_module_or_a_program(
    launches: Launches, args: list[str], entrypoint: Entrypoint, module: bool, no_python: bool
) -> None:
    """Rows 037, 038 and 040."""
    main([*args, "x", "arg"])

    config = launches.config
    assert (entrypoint, ("arg",)) == launches.calls[0][1:]
    assert (module, no_python) == (config.module, config.no_python)


@pytest.mark.parametrize(("text", "expected"), [("", ()), ("numpy", ("numpy",)), ("torch,numpy", ("torch", "numpy"))])
def test_preload_names_the_modules_that_are_imported_ahead(
    launches: Launches, text: str, expected: tuple[str, ...]
) -> None:
    main(["--preload", text, "train.py"])

    assert expected == launches.config.preload


@pytest.mark.parametrize(
    ("options", "environment", "prefix"),
    [
        (["--log-line-prefix-template", "a"], {"PET_LOG_LINE_PREFIX_TEMPLATE": "b"}, "a"),
        (["--log_line_prefix_template=a"], {}, "a"),
        ([], {"PET_LOG_LINE_PREFIX_TEMPLATE": "b"}, "b"),
        ([], {"PET_LOG_LINE_PREFIX_TEMPLATE": ""}, "c"),
        ([], {}, "c"),
        (["--log-line-prefix-template", ""], {"PET_LOG_LINE_PREFIX_TEMPLATE": "b"}, "c"),
    ],
)
def test_requested_prefix_overrides_the_one_in_the_environment(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environment: dict[str, str],
    prefix: str,
) -> None:
    """Row 071."""
    for name, value in {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "c", **environment}.items():
        monkeypatch.setenv(name, value)

    main([*options, "train.py"])

    assert prefix == launches.config.log_line_prefix_template


class Shtab(types.ModuleType):
    """Stands in for the package that makes completions: it tells what it was asked for."""

    SUPPORTED_SHELLS = ("bash", "fish")
    FILE = "any file"

    @staticmethod
    def complete(parser: argparse.ArgumentParser, shell: str) -> str:
        return f"{parser.prog} in {shell}"


@pytest.mark.parametrize("option", ["--print-completion", "--print_completion", "--print-compl"])
def test_completion_of_elasticrun_is_printed_whatever_else_is_given(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", Shtab("shtab"))

    assert 0 == as_program("--nnodes", "2", option, "fish")

    assert "elasticrun in fish\n" == capsys.readouterr().out
    assert not launches.calls


def test_a_completion_for_an_unknown_shell_is_wrong_usage(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", Shtab("shtab"))

    message = refusal(capsys, "--print-completion", "tcsh")

    assert "--print-completion: invalid choice: 'tcsh' (choose from bash, fish)" in message


@pytest.mark.parametrize(("shell", "status"), [("bash", 1), ("ksh", 2)])
def test_completion_without_its_package_names_what_to_install(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str, status: int
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert status == as_program("--print-completion", shell)

    lines = capsys.readouterr().err.splitlines()
    assert status == 2 or ["--print-completion needs the package shtab: pip install shtab"] == lines


def test_a_completion_knows_every_option(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")

    assert 0 == as_program("--print-completion", "bash")

    script = capsys.readouterr().out
    assert " _shtab_elasticrun elasticrun" in script
    assert "quiet" in script
    assert [] == [row.long for row in ROWS if row.long not in script]


FAILURE = ProcessFailure(0, 11, 3, "", message="it broke", timestamp=1.0)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("nproc=0 is wrong"), 2, "elasticrun: error: nproc=0 is wrong\n"),
        (StartError("no process"), 1, "elasticrun: no process\n"),
        (RendezvousTimeoutError("1 of 2 came"), 1, "elasticrun: 1 of 2 came\n"),
        (SignalException("stopped by SIGTERM", signal.SIGTERM), 1, "elasticrun: stopped by SIGTERM\n"),
        (LaunchInterrupted("stopped by SIGINT", signal.SIGINT), 1, "elasticrun: stopped by SIGINT\n"),
        (KeyboardInterrupt(), 1, "elasticrun: interrupted\n"),
        (ChildFailedError("train.py", {0: FAILURE}), 1, f"{ChildFailedError('train.py', {0: FAILURE})}\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_error_becomes_a_message_and_an_exit_status(
    launches: Launches, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, message: str
) -> None:
    """Row 088."""
    launches.fails = error

    assert status == as_program("train.py")
    assert message == capsys.readouterr().err
    with pytest.raises(type(error)):  # as torch's, for programs that call it
        main(["train.py"])


def test_the_launchers_traceback_is_shown_for_debugging_only(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.fails = StartError("no process")
    monkeypatch.setenv("LOGLEVEL", "debug")

    assert 1 == as_program("train.py")
    assert "Traceback" in capsys.readouterr().err


def test_the_report_is_shown_once_for_debugging_too(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's own frames are shown, not the worker's traceback again."""
    launches.fails = ChildFailedError("train.py", {0: FAILURE})
    launches.fails.__cause__ = KeyError("learning_rate")
    monkeypatch.setenv("LOGLEVEL", "debug")

    assert 1 == as_program("train.py")
    shown = capsys.readouterr().err
    assert 1 == shown.count("Root Cause")
    assert "in carry_out\n" in shown
    assert "KeyError" not in shown


def test_a_defect_of_the_library_is_not_dressed_up(launches: Launches) -> None:
    launches.fails = ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError):
        main(["train.py"])


@pytest.mark.parametrize(("level", "shown"), [(None, False), ("INFO", True), ("info", True), ("20", True)])
def test_loglevel_sets_what_the_console_shows(
    launches: Launches,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    level: str | None,
    shown: bool,
) -> None:
    """Row 172."""
    if level is not None:
        monkeypatch.setenv("LOGLEVEL", level)

    def launch(config: LaunchConfig, entrypoint: Entrypoint) -> Callable[..., None]:
        return lambda *args: logging.getLogger("elasticlib.agent").info("round 0 is seated")

    monkeypatch.setattr(elasticlib.launch, "elastic_launch", launch)

    main(["train.py"])

    assert shown == ("round 0 is seated" in capsys.readouterr().err)


def test_an_unknown_loglevel_is_refused(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGLEVEL", "chatty")

    assert "LOGLEVEL='chatty'" in refusal(capsys, "train.py")


def test_main_leaves_the_logger_as_it_was(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "INFO")
    logger = logging.getLogger("elasticlib")
    before = (logger.level, list(logger.handlers))

    main(["train.py"])

    assert before == (logger.level, list(logger.handlers))
