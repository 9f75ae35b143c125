"""Rows 161 to 165 and 169: the launch as a program calls it."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from tests.checklist._workers import QUICK
from tests.checklist.peers import REPORT, Peer, free_port

LONG = 120.0
"""Seconds: workers that import torch, on a busy machine."""

FIELDS = """
min_nodes max_nodes nproc_per_node logs_specs run_id role rdzv_endpoint rdzv_backend rdzv_configs rdzv_timeout
max_restarts monitor_interval start_method log_line_prefix_template metrics_cfg local_addr event_log_handler
numa_options signals_to_handle duplicate_stdout_filters duplicate_stderr_filters virtual_local_rank shutdown_timeout
""".split()


@pytest.mark.row(161)
@pytest.mark.slow
def test_the_fields_of_a_launch_their_order_and_their_defaults(peer: Peer) -> None:
    """Check that no field is missing or moved; default backend, start method, size differ from torch's."""
    launch_config = peer.module("launcher").LaunchConfig

    config = launch_config(1, 2, 3)

    assert FIELDS == list(inspect.signature(launch_config).parameters)[: len(FIELDS)]
    assert (1, 2, 3) == (config.min_nodes, config.max_nodes, config.nproc_per_node)
    assert (3, "default_role", 0.1) == (config.max_restarts, config.role, config.monitor_interval)
    assert ("", "", -1, "null") == (
        config.run_id,
        config.rdzv_endpoint,
        config.rdzv_timeout,
        config.event_log_handler,
    )
    assert "SIGTERM,SIGINT,SIGHUP,SIGQUIT" == config.signals_to_handle
    assert (None, None, {}, False) == (
        config.local_addr,
        config.log_line_prefix_template,
        config.metrics_cfg,
        config.virtual_local_rank,
    )


@pytest.mark.row(162)
@pytest.mark.slow
def test_the_time_limit_of_the_rendezvous_is_one_of_its_options(peer: Peer) -> None:
    launch_config = peer.module("launcher").LaunchConfig

    assert 900 == launch_config(1, 1, 1).rdzv_configs["timeout"]
    assert 7 == launch_config(1, 1, 1, rdzv_configs={"timeout": 7}).rdzv_configs["timeout"]
    assert 5 == launch_config(1, 1, 1, rdzv_configs={"timeout": 7}, rdzv_timeout=5).rdzv_configs["timeout"]


CALL = """
import json, sys
from {distributed}.launcher import LaunchConfig, elastic_launch
from {elastic}.multiprocessing.errors import ChildFailedError

def train(first, second):
    import os
    return [first, second, int(os.environ["RANK"]) ** 2]

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    if sys.argv[1] == "function":
        print(json.dumps(sorted(elastic_launch(config, train)("a", "b").items())))
    else:
        print(json.dumps(sorted(elastic_launch(config, sys.executable)("-c", "pass").items())))
        try:
            elastic_launch(config, sys.executable)("-c", "import os; os._exit(3 * int(os.environ['RANK']))")
        except ChildFailedError as error:
            print(json.dumps([error.name, error.failures[1].exitcode, error.get_first_failure()[0]]))
"""


@pytest.mark.row(163)
@pytest.mark.slow
@pytest.mark.sampled(0.5)
def test_a_function_returns_its_values_by_global_rank(peer: Peer) -> None:
    done = peer.python(CALL, "function", limit=LONG)

    assert 0 == done.returncode, done.err
    assert [[0, ["a", "b", 0]], [1, ["a", "b", 1]]] == json.loads(done.out)


@pytest.mark.row(164)
@pytest.mark.slow
@pytest.mark.sampled(0.5)
def test_a_program_returns_nothing_and_its_failure_is_raised(peer: Peer) -> None:
    done = peer.python(CALL, "program", limit=LONG)

    assert 0 == done.returncode, done.err
    good, bad = map(json.loads, done.out.splitlines())
    assert [[0, None], [1, None]] == good
    assert [3, 1] == bad[1:]


UNNAMED = """
import sys
from {distributed}.launcher import LaunchConfig, elastic_launch

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", rdzv_endpoint=sys.argv[1], max_restarts=0)
    elastic_launch(config, sys.executable)("-c", "import os; print('id=' + os.environ['TORCHELASTIC_RUN_ID'])")
"""


@pytest.mark.row(165)
@pytest.mark.slow
@pytest.mark.sampled(0.5)
def test_a_job_without_a_name_gets_one_and_a_warning(peer: Peer) -> None:
    runs = [peer.python(UNNAMED, f"localhost:{free_port()}") for _ in range(2)]

    assert [0, 0] == [done.returncode for done in runs], runs[0].err
    names = [done.out.partition("id=")[2].strip() for done in runs]
    assert 2 == len({*names} - {""})
    for done, name in zip(runs, names, strict=True):
        assert re.search(rf"run_id.*{re.escape(name)}", done.err)


@pytest.mark.row(169)
@pytest.mark.slow
@pytest.mark.sampled(0.5)
def test_the_shortcut_for_nodes_that_are_alike_gives_the_same_ranks(peer: Peer) -> None:
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    options += ["--rdzv-endpoint", f"localhost:{free_port()}", peer.script(REPORT)]
    environment = {**QUICK, "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}

    nodes = [peer.start(*options, env=environment) for _ in range(2)]
    ends = [peer.finish(node) for node in nodes]

    assert [0, 0] == [end.returncode for end in ends], ends[0].err
    seen = [{name: int(each.env[name]) for name in ("RANK", "GROUP_RANK", "LOCAL_RANK")} for each in peer.reports()]
    assert [
        {"RANK": 2 * group + local, "GROUP_RANK": group, "LOCAL_RANK": local} for group in (0, 1) for local in (0, 1)
    ] == seen
    assert {("4", "2", "4")} == {
        tuple(each.env[name] for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"))
        for each in peer.reports()
    }
