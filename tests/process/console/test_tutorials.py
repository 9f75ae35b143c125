"""The notebooks, executed as a reader would: what their cells show."""

from __future__ import annotations

import ast
import functools
import os
import re
import time
from pathlib import Path
from typing import Any, TypeAlias

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
LIMIT = 60
"""Seconds for a cell."""

Cells: TypeAlias = dict[str, Any]


def kept(name: str) -> Any:
    """The notebook as it is in the repository."""
    return nbformat.read(NOTEBOOKS[name], as_version=4)  # type: ignore[no-untyped-call]


@functools.cache
def executed(name: str) -> tuple[Cells, float]:
    """The cells by id, after all of them were executed, and the seconds that it took; a cell that fails, fails here."""
    notebook = kept(name)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    # With this variable a kernel does not show what child processes print.
    env.pop("PYTEST_CURRENT_TEST", None)
    resources = {"metadata": {"path": str(NOTEBOOKS[name].parent)}}
    client = NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources=resources)
    began = time.monotonic()
    client.execute(env=env)
    return {cell.id: cell for cell in notebook.cells}, time.monotonic() - began


def value(cell: Any) -> Any:
    """Return the value of the last line of a cell."""
    (output,) = (output for output in cell.outputs if output.output_type == "execute_result")
    return ast.literal_eval(output.data["text/plain"])


def printed(*cells: Any) -> str:
    return "".join(o.text for cell in cells for o in cell.get("outputs", ()) if o.output_type == "stream")


def raised(cell: Any) -> str:
    """The traceback that a cell shows, without colours."""
    (output,) = (output for output in cell.outputs if output.output_type == "error")
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output.traceback))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    code = [cell for cell in kept(name).cells if cell.cell_type == "code"]

    assert [] == [output for cell in code for output in cell.outputs]
    assert {None} == {cell.execution_count for cell in code}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_starts_with_its_title_and_links_to_what_is_there(name: str) -> None:
    texts = [cell.source for cell in kept(name).cells if cell.cell_type == "markdown"]
    links = [target for text in texts for target in re.findall(r"\]\((?!https?:)([^)#]+)", text)]

    assert texts[0].startswith("# ")
    assert [] == [target for target in links if not (NOTEBOOKS[name].parent / target).exists()]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_to_its_end(name: str, pytestconfig: pytest.Config) -> None:
    """Each in less than a minute on two idle cores; the time is shown, not judged."""
    _, seconds = executed(name)

    pytestconfig.get_terminal_writer().line(f"\n{name}.ipynb took {seconds:.1f} s")


@pytest.mark.slow
@pytest.mark.sampled(0.2)
class Shown:
    """Base of the tests of one notebook's output; the class is named after the notebook."""

    @pytest.fixture
    def cells(self) -> Cells:
        return executed(type(self).__name__.removeprefix("Test").lower())[0]


class TestQuickstart(Shown):
    def test_a_function_of_a_cell_trains_on_two_workers(self, cells: Cells) -> None:
        accuracies = value(cells["launch"])

        assert {0, 1} == accuracies.keys()
        assert min(accuracies.values()) >= 0.95

    def test_output_of_a_worker_appears_in_the_notebook(self, cells: Cells) -> None:
        """Both trainings; a kernel may attach the last lines to the cell after."""
        lines = re.findall(r"^epoch (\d)/8 loss", printed(*cells.values()), re.M)

        assert 2 * [str(epoch) for epoch in range(1, 9)] == lines

    def test_a_returned_object_is_of_the_class_of_the_cell(self, cells: Cells) -> None:
        assert "the network is a Digits: True" in printed(cells["net"])

    def test_a_function_of_a_cell_survives_the_loss_of_a_worker(self, cells: Cells) -> None:
        results = value(cells["loss"])

        assert [1, 1] == [attempt for attempt, _ in results.values()]
        assert min(accuracy for _, accuracy in results.values()) >= 0.95

    def test_failure_is_shown_with_the_workers_own_exception_and_line(self, cells: Cells) -> None:
        shown = printed(cells["failure"])

        assert "rank 1 failed first: ZeroDivisionError: division by zero" in shown
        assert "cause: ZeroDivisionError('division by zero')" in shown
        assert "return 1 / (divisor - rank)" in shown


class TestFailures(Shown):
    def test_the_traceback_is_short_and_ends_at_the_bug(self, cells: Cells) -> None:
        lines = raised(cells["traceback"]).splitlines()

        assert len(lines) < 10
        assert "in the worker of rank 2:" in lines
        assert lines[-2].endswith("mean = torch.tensor([sum(shard) / len(shard)])")
        assert "ZeroDivisionError: division by zero" == lines[-1]

    def test_failures_name_the_rank_that_failed_first(self, cells: Cells) -> None:
        shown = printed(cells["failures"])

        assert "rank 2 failed first: ZeroDivisionError: division by zero" in shown
        assert re.search(r"^rank 2: exit code 1, process \d+$", shown, re.M)

    def test_log_of_the_failed_rank_shows_the_reason(self, cells: Cells) -> None:
        assert "rank 2 has 0 samples\n" in printed(cells["logs"])

    def test_fixed_function_returns_the_mean(self, cells: Cells) -> None:
        assert dict.fromkeys(range(3), 3.875) == value(cells["fixed"])

    def test_a_hang_is_seen_in_the_lines_of_a_rank_and_by_a_timeout(self, cells: Cells) -> None:
        assert [f"rank 1: step {step}" for step in range(4)] == printed(cells["hang"]).splitlines()
        assert "job 'train': running for" in printed(cells["timeout"])
        assert 2 == printed(cells["timeout"]).count("step 3")

    def test_stacks_show_the_rank_that_waits_and_the_one_in_a_collective(self, cells: Cells) -> None:
        _, first, second = re.split(r"^rank \d:$", printed(cells["stacks"]), flags=re.M)

        assert "in all_reduce" in first and "in next_batch" not in first
        assert "in next_batch" in second and "in all_reduce" not in second

    def test_stopped_job_shows_that_state(self, cells: Cells) -> None:
        why, table = printed(cells["stop"]).split("\n", 1)

        assert "job 'train' was stopped by Job.stop()" == why
        assert table.startswith("job 'train': stopped after")


class TestElasticity(Shown):
    def test_two_nodes_start_together(self, cells: Cells) -> None:
        assert "world size 2: begin after step 0" == printed(cells["formed"]).splitlines()[0]

    def test_other_node_continues_alone_from_the_checkpoint_after_a_kill(self, cells: Cells) -> None:
        (begun,) = re.findall(r"^world size 1: begin after step (\d+)$", printed(cells["kill"]), re.M)

        assert int(begun) >= 40
        assert re.search(r"^world size 1: step \d+$", printed(cells["kill"]), re.M)

    def test_a_newcomer_makes_the_world_larger_again(self, cells: Cells) -> None:
        (alone,) = re.findall(r"^world size 1: begin after step (\d+)$", printed(cells["kill"]), re.M)
        (begun,) = re.findall(r"^world size 2: begin after step (\d+)$", printed(cells["grow"]), re.M)

        assert int(begun) > int(alone)

    def test_the_training_ends_as_if_nothing_had_happened(self, cells: Cells) -> None:
        assert re.search(r"^done at step \d+: y = [\d.]+ x \+ 1\.0$", printed(cells["finish"]), re.M)
        assert {"node0": 0, "node1": -9, "node2": 0} == value(cells["finish"])

    def test_log_shows_why_each_round_ended(self, cells: Cells) -> None:
        lost, joined = re.findall(r"round \d ended: (.*)", printed(cells["log"]))

        assert re.search("is lost: its agent died|rank 0 on node .*RuntimeError", lost)
        assert joined.endswith(" joins")


class TestPool(Shown):
    def test_every_worker_takes_part_in_a_call(self, cells: Cells) -> None:
        assert {0: 10.0, 1: 10.0} == value(cells["run"])

    def test_a_call_costs_little(self, cells: Cells) -> None:
        (milliseconds,) = re.findall(r"^([\d.]+) ms for each call$", printed(cells["time"]), re.M)

        assert float(milliseconds) < 100

    def test_a_sweep_finds_the_best_rate(self, cells: Cells) -> None:
        shown = printed(cells["sweep"])

        assert ["0.001", "0.01", "0.1", "0.5", "100.0"] == re.findall(r"^lr ([\d.]+) +accuracy 0\.\d+$", shown, re.M)
        assert "best: 0.5" == shown.splitlines()[-1]

    def test_a_setting_that_fails_stands_in_its_place(self, cells: Cells) -> None:
        (output,) = (output for output in cells["errors"].outputs if output.output_type == "execute_result")

        number = r"0\.\d+"
        assert re.fullmatch(
            rf"\[{number},\s+ValueError\('lr must be positive, not -1\.0'\),\s+{number}\]", output.data["text/plain"]
        )

    def test_the_best_rate_trains_on_all_workers_alike(self, cells: Cells) -> None:
        accuracies = value(cells["ddp"])

        assert {0, 1} == accuracies.keys()
        assert accuracies[0] == accuracies[1] >= 0.9

    def test_closed_pool_shows_that_state(self, cells: Cells) -> None:
        (output,) = (output for output in cells["close"].outputs if output.output_type == "execute_result")

        assert ": closed, 104 calls" in output.data["text/plain"]


class TestTesting(Shown):
    def test_a_body_runs_on_ranks_and_a_function_is_called_on_them(self, cells: Cells) -> None:
        shown = printed(cells["passing"])

        assert re.search(r"test_every_rank_has_the_mean\[nproc=2\] PASSED", shown)
        assert "2 passed" in shown

    def test_a_failure_shows_the_diff_once_for_both_ranks(self, cells: Cells) -> None:
        shown = printed(cells["failure"])

        assert 1 == shown.count("At index 2 diff: 4 != 5")
        assert "ranks 0-1 of 2" in shown and "rank 1 was here" in shown
        assert re.search(r"^FAILED test_failure.py::test_shares - ranks 0-1, line \d+: ", shown, re.M)

    def test_a_hang_shows_each_rank_and_the_next_test_passes(self, cells: Cells) -> None:
        shown = printed(cells["hang"])

        assert re.search(r"^rank 0: test_hang.py:\d+ in the collective all_reduce$", shown, re.M)
        assert re.search(r"^rank 1: test_hang.py:\d+ in wait$", shown, re.M)
        assert "1 failed, 1 passed" in shown

    def test_a_case_of_unittest_runs_on_ranks(self, cells: Cells) -> None:
        assert "OK" == printed(cells["unittest"]).split()[-1]
