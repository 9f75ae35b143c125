"""Hosts of the engine `Ssh`: names, host files, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from elasticlib.engines import Ssh
from elasticlib.engines._hostfile import SshHost, parse_host, parse_hostfile
from elasticlib.engines._protocol import AgentCommand
from elasticlib.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1", SshHost("h1")),
        ("user@h2:2222", SshHost("h2", "user", 2222)),
        ("10.0.0.1", SshHost("10.0.0.1")),
        ("fe80::1", SshHost("fe80::1")),
        ("root@[fe80::1]:22", SshHost("fe80::1", "root", 22)),
    ],
)
def test_host_is_read(text: str, expected: SshHost) -> None:
    assert expected == parse_host(text)


@pytest.mark.parametrize("text", ["", "a b", "-oProxyCommand=x", "h1:", "h1:70000", "@h1", "u@", "h1:x", "[h1]:22"])
def test_text_that_is_not_a_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"hosts='"):
        parse_host(text)


@given(st.text(max_size=200))
def test_any_host_file_is_read_or_refused(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "hosts")
    except ConfigError as error:
        assert error.setting == "hosts"
    else:
        assert all(host.name and not host.name.startswith("-") for host in hosts)


def test_host_files_of_deepspeed_and_open_mpi_are_read(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# nodes\nh1 slots=8\nroot@h2 slots=4 max_slots=8 # big\n\nh3\n")

    engine = Ssh(tmp_path / "hosts")

    assert (SshHost("h1", slots=8), SshHost("h2", "root", slots=4), SshHost("h3")) == engine.hosts
    assert 3 == engine.nodes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h1 slots=0", "'slots=0' is not a setting of a host"),
        ("h1 gpus=8", "'gpus=8' is not a setting of a host"),
        ("h1\nh1", "'h1' is given twice"),
        ("# nothing", "names no host"),
    ],
)
def test_host_file_with_an_error_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)

    with pytest.raises(ConfigError, match=message):
        Ssh(str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": "/no/file"}, "not a readable host file"),
        ({"hosts": [1]}, "must be a list of names"),
        ({"hosts": None}, "None must be a list of names"),
        ({"hosts": []}, "names no host"),
        ({"hosts": ["h1"], "timeout": 0.5}, "timeout=0.5 must be at least 1 second"),
        ({"hosts": ["h1"], "options": "-v"}, "options='-v' must be a list"),
    ],
)
def test_bad_argument_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ssh(**arguments)  # type: ignore[arg-type]


def test_command_line_quotes_all_for_the_shell_of_the_host() -> None:
    engine = Ssh(["user@h2:2222"], python="/a b/python", env={"A": "1; rm"}, options=("-i", "key"), timeout=8)

    line = engine.line(engine.hosts[0], AgentCommand(("-m", "agent"), b""))

    assert ["ssh", "-T", "-i", "key"] == line[:4]
    assert {"BatchMode=yes", "ServerAliveInterval=2"} <= set(line)
    assert ["-p", "2222", "--", "user@h2"] == line[-5:-1]
    assert "exec env 'A=1; rm' '/a b/python' -m agent --lease 8" == line[-1]
