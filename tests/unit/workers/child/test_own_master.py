"""A process group at an address that the program has set itself."""

from __future__ import annotations

import os
import socket
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticlib.workers.child import _serving

AT_LAUNCHER, ELSEWHERE = 29500, 12355
VARIABLES = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_PORT": str(AT_LAUNCHER),
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
}
Create = Callable[..., Any]


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Create]]:
    """Gives torch's function as a worker with certain variables has it; it returns whether all ranks are clients."""
    module = types.ModuleType("torch.distributed.rendezvous")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def attached(*, is_hosted: bool, then: Callable[[], None] = lambda: None, **changed: str) -> Create:
        def are_clients(hostname: str, port: int, rank: int) -> bool:
            then()
            return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

        module._create_c10d_store = are_clients  # type: ignore[attr-defined]
        _serving.attach_own_master({**VARIABLES, **changed}, is_hosted=is_hosted)
        return module._create_c10d_store  # type: ignore[attr-defined, no-any-return]

    yield attached


def test_at_an_address_of_its_own_rank_0_opens_the_store_of_a_pool(
    create: Callable[..., Create],
) -> None:
    created = create(is_hosted=True)

    assert created("localhost", AT_LAUNCHER, 0)
    assert not created("localhost", ELSEWHERE, rank=0)
    assert "True" == os.environ["TORCHELASTIC_USE_AGENT_STORE"]


@pytest.mark.parametrize("changed", [{"GROUP_WORLD_SIZE": "2"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}])
def test_several_nodes_or_no_store_of_the_launcher_change_nothing(
    changed: dict[str, str], create: Callable[..., Create]
) -> None:
    assert create(is_hosted=True, **changed)("localhost", ELSEWHERE, 0)


def test_a_failure_leaves_the_variable_as_it_was(create: Callable[..., Create]) -> None:
    def fail() -> None:
        raise RuntimeError("the port is taken")

    with pytest.raises(RuntimeError, match="taken"):
        create(is_hosted=True, then=fail)("localhost", ELSEWHERE, 0)

    assert "True" == os.environ["TORCHELASTIC_USE_AGENT_STORE"]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_serving, "_PATIENCE", 0.2)
    monkeypatch.setattr(_serving, "_PAUSE", 0.01)


def joined_watcher() -> None:
    for thread in _serving.threading.enumerate():
        if thread.name == _serving.WATCH_NAME:
            thread.join()


@pytest.mark.usefixtures("soon")
def test_elsewhere_a_warning_names_the_cause_where_nobody_listens(
    create: Callable[..., Create], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    create(is_hosted=False, then=joined_watcher)("localhost", port, 0)

    assert f"wait for a store at localhost:{port}, where no process listens" in capfd.readouterr().err


@pytest.mark.usefixtures("soon")
def test_nothing_is_printed_if_the_store_exists(
    create: Callable[..., Create], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("localhost", 0)) as server:
        create(is_hosted=False, then=joined_watcher)("localhost", server.getsockname()[1], 0)

    assert "" == capfd.readouterr().err


@pytest.mark.usefixtures("soon")
def test_one_rank_of_a_node_speaks(create: Callable[..., Create], capfd: pytest.CaptureFixture[str]) -> None:
    create(is_hosted=False, then=joined_watcher, LOCAL_RANK="1")("localhost", 9, 0)

    assert "" == capfd.readouterr().err
