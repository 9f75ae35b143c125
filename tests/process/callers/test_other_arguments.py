"""A sweep on one endpoint: the second launch of a script with other arguments must not be a silent spare."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.process.launches import WORKER, Launch, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

Start = Callable[..., Launch]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts nodes of one job, each with its own learning rate."""
    port = free_port()
    launches: list[Launch] = []

    def new(rate: str, nodes: str) -> Launch:
        launches.append(Launch(port, "none", ("--nnodes", nodes), (*WORKER, f"--lr={rate}", "--token=s3cret")))
        return launches[-1]

    yield new
    for launch in launches:
        launch.close()


def test_second_launch_of_a_job_of_one_node_fails_with_both_commands(start: Start) -> None:
    first = start("0.1", "1").at_work()
    second = start("0.2", "1")

    status, output = second.ends()
    assert 1 == status
    assert "--lr=0.1" in output and "--lr=0.2" in output and "(--rdzv-id)" in output, output
    assert "s3cret" not in output
    first.finish()
    assert 0 == first.ends()[0]


def test_spare_with_other_arguments_warns_both_and_ends_with_a_failure(start: Start) -> None:
    first = start("0.1", "1:2").at_work()
    second = start("0.1", "1:2").at_work()
    spare = start("0.2", "1:2")
    warnings = [node.wait_for_line("--lr=0.2") for node in (first, spare)]
    for node in (first, second):
        node.finish()

    assert [0, 0] == [node.ends()[0] for node in (first, second)]
    status, output = spare.ends()
    assert (1, True) == (status, "has other arguments and ran nothing" in output), output
    assert all("--lr=0.1" in line and "if these are two jobs" in line for line in warnings), warnings


def test_spare_with_equal_arguments_ends_with_success(start: Start) -> None:
    first = start("0.1", "1").at_work()
    spare = start("0.1", "1")
    spare.wait_for_line("is a spare")
    first.finish()

    status, output = spare.ends()
    assert (0, True) == (status, "was not needed" in output), output
    assert 0 == first.ends()[0]
