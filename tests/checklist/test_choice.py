"""Rows 021 to 034: which rendezvous a command line means."""

from __future__ import annotations

import logging
import re
import uuid

import pytest

from tests.checklist.peers import Peer, free_port

STORE = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
print(os.environ["TORCHELASTIC_RUN_ID"], os.environ["MASTER_PORT"], os.environ["GROUP_RANK"], dist.get_world_size())
dist.destroy_process_group()
"""


def parameters(peer: Peer, backend: str = "c10d", endpoint: str = "", **config: object) -> object:
    rendezvous = peer.module("rendezvous")
    return rendezvous.RendezvousParameters(backend, endpoint, "job", 1, 1, **config)


@pytest.mark.row(21)
@pytest.mark.slow
@pytest.mark.sampled
def test_a_plain_run_has_a_free_port_and_a_random_id(peer: Peer) -> None:
    (seen,) = peer.report()

    assert 4 == uuid.UUID(seen.env["TORCHELASTIC_RUN_ID"]).version
    assert "29500" != seen.env["MASTER_PORT"]
    assert 0 < int(seen.env["MASTER_PORT"])


@pytest.mark.row(22)
@pytest.mark.slow
def test_standalone_overrides_backend_endpoint_and_id(peer: Peer) -> None:
    (seen,) = peer.report(
        "--standalone", "--rdzv-backend", "etcd", "--rdzv-endpoint", "192.0.2.1:1", "--rdzv-id", "mine"
    )

    assert "mine" != seen.env["TORCHELASTIC_RUN_ID"]
    assert 4 == uuid.UUID(seen.env["TORCHELASTIC_RUN_ID"]).version


@pytest.mark.row(23)
@pytest.mark.slow
@pytest.mark.sampled
def test_a_master_port_keeps_the_static_rendezvous(peer: Peer) -> None:
    port = free_port()

    (seen,) = peer.report("--master-port", str(port))

    assert str(port) == seen.env["MASTER_PORT"]
    assert "none" == seen.env["TORCHELASTIC_RUN_ID"]


@pytest.mark.row(24)
def test_static_with_several_nodes_uses_port_29500(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = peer.module("run")
    met: list[str] = []

    class Met(Exception):  # noqa: N818 - no error
        pass

    def launch(config: object, entrypoint: object) -> object:
        met.append(config.rdzv_endpoint)  # type: ignore[attr-defined]
        raise Met

    monkeypatch.setattr(
        peer.module("launch" if peer.launcher.name == "elasticlib" else "run"), "elastic_launch", launch
    )
    with pytest.raises(Met):
        run.run(run.parse_args(["--nnodes", "2", "--node-rank", "1", "--master-addr", "node0", "script.py"]))

    assert ["node0:29500"] == met


@pytest.mark.row(25)
@pytest.mark.slow
@pytest.mark.sampled
def test_static_ranks_are_the_node_ranks_and_the_world_is_the_most_nodes(peer: Peer) -> None:
    options = ("--nnodes", "2", "--master-port", str(free_port()), peer.script(STORE))

    second = peer.start("--node-rank", "1", *options)
    first = peer.run("--node-rank", "0", *options)

    assert ["0", "2"] == first.out.split()[2:]
    assert ["1", "2"] == peer.finish(second).out.split()[2:]


@pytest.mark.row(26)
@pytest.mark.parametrize("endpoint", ["", "node0"])
def test_static_without_an_address_is_refused(peer: Peer, endpoint: str) -> None:
    """A host without a port is none."""
    launcher = peer.module("launcher")
    config = launcher.LaunchConfig(2, 2, 1, run_id="job", rdzv_backend="static", rdzv_endpoint=endpoint)

    with pytest.raises(ValueError):
        launcher.elastic_launch(config, "true")()


@pytest.mark.row(27)
def test_a_node_rank_without_static_is_ignored_with_a_warning(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("elasticlib.run", "torch.distributed.run"):
        logging.getLogger(name).addHandler(caplog.handler)
    try:
        config, _, _ = peer.parse(
            "--node-rank", "3", "--nnodes", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "script.py"
        )
    finally:
        for name in ("elasticlib.run", "torch.distributed.run"):
            logging.getLogger(name).removeHandler(caplog.handler)

    assert re.search("node.rank", caplog.text)
    assert "rank" not in config.rdzv_configs


@pytest.mark.row(28)
def test_rendezvous_options_are_stripped_and_may_hold_an_equals_sign(peer: Peer) -> None:
    """A plug-in's options may be anything; the blanks around them are not theirs."""
    config, _, _ = peer.parse(
        "--rdzv-backend", "mine", "--rdzv-endpoint", "h:1", "--rdzv-conf", " a = 1 , b=x=y ", "script.py"
    )

    assert {"a": "1", "b": "x=y"} == {name: config.rdzv_configs[name] for name in ("a", "b")}


@pytest.mark.row(30)
@pytest.mark.parametrize(("config", "timeout"), [({}, 900), ({"timeout": 7}, 7)])
def test_the_rendezvous_timeout_is_900_unless_given(peer: Peer, config: dict[str, int], timeout: int) -> None:
    launch = peer.module("launcher").LaunchConfig(1, 1, 1, rdzv_configs=config)

    assert timeout == launch.rdzv_configs["timeout"]


@pytest.mark.row(31)
@pytest.mark.parametrize(("endpoint", "default", "found"), [("h", 29400, 29400), ("h", 2379, 2379), ("h:7", 2379, 7)])
def test_an_endpoint_without_a_port_gets_the_back_ends_own(peer: Peer, endpoint: str, default: int, found: int) -> None:
    parse = peer.module("rendezvous.utils").parse_rendezvous_endpoint

    assert ("h", found) == parse(endpoint, default)
    assert 29400 == peer.module("rendezvous.c10d_rendezvous_backend").DEFAULT_PORT


@pytest.mark.row(32)
@pytest.mark.parametrize(
    ("endpoint", "found"), [("[fe80::1]", ("fe80::1", 29400)), ("[fe80::1]:7", ("fe80::1", 7)), ("[::1]:0", ("::1", 0))]
)
def test_an_ipv6_address_stands_in_brackets(peer: Peer, endpoint: str, found: tuple[str, int]) -> None:
    assert found == peer.module("rendezvous.utils").parse_rendezvous_endpoint(endpoint, 29400)


@pytest.mark.row(33)
@pytest.mark.parametrize("endpoint", ["h:65536", "h:x", "h:-1"])
def test_a_bad_port_is_refused(peer: Peer, endpoint: str) -> None:
    with pytest.raises(ValueError):
        peer.module("rendezvous.utils").parse_rendezvous_endpoint(endpoint, 29400)


@pytest.mark.row(34)
def test_an_unknown_back_end_is_a_value_error_that_names_it(peer: Peer) -> None:
    wanted = parameters(peer, "carrier-pigeon", "h:1")

    with pytest.raises(ValueError, match="carrier-pigeon"):
        peer.module("rendezvous.registry").get_rendezvous_handler(wanted)
