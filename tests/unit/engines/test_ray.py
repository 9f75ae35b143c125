"""The engine `Ray` without a cluster: its settings, and the program behind an actor."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from typing import Any

import pytest

from elasticlib.engines import Ray, _ray
from elasticlib.engines._ray_actor import PipedProgram, variables
from elasticlib.errors import ConfigError


class Group:
    def __init__(self, *bundles: dict[str, float]) -> None:
        self.bundle_specs = list(bundles)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package ray be found, which no test here imports."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_missing_package_is_an_error_with_the_line_for_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"the package ray is not installed: pip install ray"):
        Ray(nodes=2)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "0 must be a whole number of at least 1"),
        ({"nodes": True}, "True must be a whole number"),
        ({"nodes": 2, "bundle": {}}, "must have the resources of a node"),
        ({"nodes": 2, "bundle": ["GPU"]}, "must have the resources of a node"),
        ({"nodes": 2, "bundle": {"GPU": 0}}, "GPU: 0 must be a number above 0"),
        ({"nodes": 2, "bundle": {"CPU": "4"}}, "CPU: '4' must be a number above 0"),
        ({"nodes": 2, "bundle": {"GPU": 0.5}}, "GPU: 0.5 must be a whole number"),
        ({"nodes": 2, "placement_group": "group"}, "'group' is not one of ray.util.placement_group"),
        ({"nodes": 2, "placement_group": Group({"CPU": 1})}, "it has 1 bundles for 2 nodes"),
        ({"nodes": 1, "bundle": {"CPU": 1}, "placement_group": Group({"CPU": 1})}, "cannot be combined"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ray(**options)


def test_two_threads_do_not_connect_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    may_connect, connects = threading.Event(), threading.Event()

    class Cluster:
        calls = 0

        def is_initialized(self) -> bool:
            return self.calls > 0 and may_connect.is_set()

        def init(self, **_: object) -> None:
            self.calls += 1
            connects.set()
            assert may_connect.wait(60)

    cluster = Cluster()
    monkeypatch.setattr(_ray, "ray_module", lambda: cluster)
    threads = [threading.Thread(target=_ray._connect) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert connects.wait(60)
    may_connect.set()
    for thread in threads:
        thread.join()

    assert 1 == cluster.calls


@pytest.mark.usefixtures("installed")
def test_bundles_are_those_of_the_group_or_one_cpu_each() -> None:
    assert [{"CPU": 1}] * 2 == Ray(nodes=2).bundles
    assert [{"GPU": 8}] == Ray(nodes=1, placement_group=Group({"GPU": 8}, {"GPU": 4})).bundles
    assert "" == Ray(nodes=2).endpoint


@pytest.mark.parametrize(
    ("now", "at_start", "expected"),
    [
        ({"OMP_NUM_THREADS": "1", "A": "b"}, {"A": "b"}, {"A": "b"}),
        ({"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}),
        ({"PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}, {}, {}),
        ({"PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}, {"PYTHONBREAKPOINT": "a.b"}, {"PYTHONBREAKPOINT": "a.b"}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
    ids=["set by Ray", "set by the user", "debugger of Ray", "debugger of the user", "assigned by Ray"],
)
def test_variable_that_ray_has_set_in_its_process_is_removed(
    now: dict[str, str], at_start: dict[str, str], expected: dict[str, str]
) -> None:
    assert expected == variables(now, at_start)


@pytest.fixture
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the one function of Ray that the actor calls."""
    module = types.ModuleType("ray.util")
    module.get_node_ip_address = lambda: "10.0.0.7"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", module)


def output_of(program: PipedProgram) -> tuple[bytes, str]:
    """All bytes of a program, and the text about its end."""
    found = b""
    while isinstance(part := program.read(), bytes):
        found += part
    return found, part


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_node")
def test_program_gets_its_input_and_the_address_of_its_node() -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['A'], sys.stdin.read())"
    program = PipedProgram(["-c", code], {"A": "b"})

    program.send(b"one ")
    program.send(b"two")
    program.end_input()

    assert (b"['--address', '10.0.0.7'] b one two\n", "its program ended with status 0") == output_of(program)
    program.send(b"late")


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_node")
def test_end_of_a_program_shows_its_last_message() -> None:
    program = PipedProgram(["-c", "import sys; sys.exit('no module')"], {})

    assert (b"", "its program ended with status 1: no module") == output_of(program)
    program.end_input()
