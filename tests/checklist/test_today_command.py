"""Rows 201 to 211: what torch 2.14 and 2.15 added to the command line, and what torchrun takes there."""

from __future__ import annotations

import re
import socket

import pytest

from tests.checklist.peers import ROOT, Peer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

TODAY = (2, 15)
TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SHTAB = """
SUPPORTED_SHELLS = ["bash", "fish"]
FILE = "any"
def complete(parser, shell):
    return f"complete {parser.prog} for {shell}"
"""


def prefixed(peer: Peer, *options: str, **env: str) -> str:
    """Return the text before the line of one worker."""
    script = peer.script("print('a line')")
    done = peer.run("--tee", "3", "--log-dir", "logs", *options, script, env=env)
    assert "a line\n" in done.out, done.err
    return done.out.partition("a line\n")[0]


@pytest.mark.row(201, since=TODAY)
@pytest.mark.parametrize("option", ["--log-line-prefix-template", "--log_line_prefix_template"])
def test_the_option_for_the_prefix_beats_its_variable_and_the_older_one(peer: Peer, option: str) -> None:
    variables = {TEMPLATE: "old ", "PET_LOG_LINE_PREFIX_TEMPLATE": "new "}

    assert "0/0/trainer " == prefixed(
        peer, "--role", "trainer", option, "${rank}/${local_rank}/${role_name} ", **variables
    )


@pytest.mark.row(202, since=TODAY)
def test_the_variable_of_the_prefix_beats_the_older_one_unless_it_is_empty(peer: Peer) -> None:
    assert "new " == prefixed(peer, **{TEMPLATE: "old ", "PET_LOG_LINE_PREFIX_TEMPLATE": "new "})
    assert "old " == prefixed(peer, **{TEMPLATE: "old ", "PET_LOG_LINE_PREFIX_TEMPLATE": ""})


@pytest.mark.row(203, since=TODAY)
def test_a_prefix_may_hold_this_hosts_short_name(peer: Peer) -> None:
    assert f"{socket.gethostname()}: " == prefixed(peer, **{TEMPLATE: "${hostname}: "})


def with_module(peer: Peer, code: str) -> dict[str, str]:
    """An environment in which *code* is the package that makes completions."""
    peer.script(code, "first/shtab.py")
    return {"PYTHONPATH": f"{peer.folder}/first:{ROOT}"}


@pytest.mark.row(204, since=TODAY)
@pytest.mark.parametrize("option", ["--print-completion", "--print_completion"])
def test_a_completion_of_the_command_is_printed_by_shtab(peer: Peer, option: str) -> None:
    done = peer.run(option, "fish", env=with_module(peer, SHTAB))

    assert 0 == done.returncode, done.err
    assert re.fullmatch(r"complete (elastic|torch)run for fish\n", done.out)


@pytest.mark.row(205, since=TODAY)
def test_without_shtab_one_line_names_the_package_to_install(peer: Peer) -> None:
    done = peer.run("--print-completion", "zsh", env=with_module(peer, "raise ImportError('no such package')"))

    assert (1, "") == (done.returncode, done.out)
    assert ["pip install shtab"] == [line.rpartition(": ")[2] for line in done.err.splitlines()]


@pytest.mark.row(206, since=TODAY)
def test_a_shell_that_is_unknown_is_wrong_usage(peer: Peer) -> None:
    done = peer.run("--print-completion", "ksh", env=with_module(peer, SHTAB))

    assert 2 == done.returncode
    assert "invalid choice: 'ksh'" in done.err


@pytest.mark.row(207, since=TODAY)
@pytest.mark.parametrize(("value", "status"), [("0.5", 0), ("0", 0), ("-1", None), ("nan", None), ("x", None)])
def test_the_time_between_repeated_writes_is_taken_and_checked(peer: Peer, value: str, status: int | None) -> None:
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job7")

    done = peer.run(*place, "--rdzv-conf", f"cas_backoff_max_seconds={value}", peer.script("print('ran')"))

    assert (done.returncode == 0) == (status == 0), done.err
    assert ("ran" in done.out) == (status == 0)
    assert status == 0 or "cas_backoff_max_seconds" in done.err


C10D = "--rdzv-backend c10d --rdzv-endpoint localhost:PORT --rdzv-id job7"


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        pytest.param(options, variables, marks=pytest.mark.row(number), id=f"{number} {options} {variables or ''}")
        for number, options, variables in [
            (208, f"{C10D} --rdzv-conf join_timeout=x,join_timeout=60", {}),
            (208, f"{C10D} --rdzv-conf store_type=TCP", {}),
            (208, f"{C10D} --rdzv-conf protocol=https,ssl_cert=nowhere", {}),
            (208, f"{C10D} --rdzv-conf is_hots=1", {}),
            (208, f"{C10D} --rdzv-conf rank=5", {}),
            (208, f"{C10D} --rdzv-conf timeout=60", {}),
            (209, "--standalone --nnodes 1:3", {}),
            (209, "--node-rank 1", {}),
            (209, "--standalone --rdzv-backend nonsense", {}),
            (209, "--rdzv-endpoint localhost:PORT --master-addr node0 --master-port 1", {}),
            (209, "--rdzv-backend c10d --rdzv-endpoint localhost:PORT --nnodes 1:1 --node-rank 3", {}),
            (210, "", {"PET_START_METHOD": "bogus"}),
            (210, "", {"PET_LOCAL_ADDR": ""}),
            (210, "", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": " 7 "}),
        ]
    ],
)
def test_options_and_variables_that_torchrun_takes_stop_no_job(
    peer: Peer, options: str, variables: dict[str, str]
) -> None:
    """Options twice, unknown, of another backend or overridden by another one; variables of odd values."""
    args = options.replace("PORT", str(free_port())).split()

    done = peer.run(*args, peer.script("print('ran')"), env=variables)

    assert (0, True) == (done.returncode, "ran" in done.out), done.err


@pytest.mark.row(211, since=TODAY)
def test_rocms_own_list_of_devices_is_the_one_that_is_mapped(peer: Peer) -> None:
    lists = {"HIP_VISIBLE_DEVICES": "5, 6", "CUDA_VISIBLE_DEVICES": "0,1"}

    seen = peer.report("--virtual-local-rank", "--nproc-per-node", "2", env=lists)

    assert [("5", "5"), ("6", "6")] == [
        (each.env["HIP_VISIBLE_DEVICES"], each.env["CUDA_VISIBLE_DEVICES"]) for each in seen
    ]


@pytest.mark.row(211, since=TODAY)
def test_a_list_of_rocm_that_is_too_short_is_named(peer: Peer) -> None:
    done = peer.run(
        "--virtual-local-rank", "--nproc-per-node", "2", peer.script("print('ran')"), env={"HIP_VISIBLE_DEVICES": "5"}
    )

    assert done.returncode != 0
    assert "HIP_VISIBLE_DEVICES" in done.err
    assert "ran" not in done.out
