"""
The program on each node of a batch job: ``python -m elasticlib.remote._batch_node FOLDER``, started by ``srun``.

It reads the call from the folder, launches its node as ``elasticrun`` does in the same step, and writes the outcome to
the folder. It exits with the status of ``elasticrun``.

Rules of this file: without the token of the submission nothing is read. A run of the job after which it is requeued
writes no outcome: the next run will.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from functools import partial
from typing import NoReturn

from attrs import evolve

from elasticlib import records
from elasticlib._clock import sleep, wall_time
from elasticlib.cli import ExitSettings, exit_status, give_allocation_back, report_end
from elasticlib.engines import EngineContext, engine_context, kill_wait, reachable, with_all_nodes
from elasticlib.errors import ConfigError, ElasticError, StartError
from elasticlib.job import Job, Results
from elasticlib.launch import CheckedLaunch
from elasticlib.processes import start_thread
from elasticlib.remote._batch_files import CALL, BatchFolder, report_name, result_name
from elasticlib.remote._call import Call, pack_error, pack_results, settings_on_node, unpack_call
from elasticlib.remote._node_log import name_machine_in_log
from elasticlib.remote._node_reporter import NodeReporter
from elasticlib.remote._node_reports import NodeReport, seconds_between_reports
from elasticlib.run import carry_out
from elasticlib.spec import TOKEN_VARIABLE, LaunchConfig

_LOOK_SECONDS = 1.0
"""Seconds between two looks for the client's request to kill the workers."""
_REPORT_SECONDS = 2.0
"""Seconds between two reports of a node, in a job of few nodes: shared file systems are slow at new files."""


def main() -> None:
    """Run this node to its end, and exit with its status."""
    parser = argparse.ArgumentParser(prog="python -m elasticlib.remote._batch_node")
    parser.add_argument("folder")
    parser.add_argument("--requeue", type=int, default=0)
    options = parser.parse_args()
    name_machine_in_log()
    carry_out(lambda: _run(options.folder, options.requeue), whole_program=True)


def _run(path: str, requeue: int) -> NoReturn:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: Slurm did not pass the client's environment to this step")
    context = engine_context(os.environ, "slurm", now=wall_time())
    assert context is not None
    node = _BatchNode(BatchFolder(path, token), context, ExitSettings(requeue=requeue, engine=context))
    sys.exit(node.run())


class _BatchNode:
    """This node of the call."""

    def __init__(self, folder: BatchFolder, context: EngineContext, exits: ExitSettings) -> None:
        self._folder, self._context, self._exits = folder, context, exits
        self._world = 0
        self._job: Job | None = None
        self._kill_watch: threading.Thread | None = None

    def run(self) -> int:
        """Launch the node, write its outcome, and return the exit status."""
        try:
            results = self._launched()
            self._write(pack_results(results, results.places, self._world))
        except BaseException as error:
            return self._failed(error)
        return 0

    def _launched(self) -> Results:
        try:
            packed = self._folder.read(CALL)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the call cannot be read: {error}") from error
        call = unpack_call(packed)
        launch = CheckedLaunch(self._config(call), call.entrypoint, call.args, None, call.kwargs, has_keyboard=False)
        self._job = Job(launch, listener=self._listen)
        reporter = NodeReporter(
            self._job, self._report, seconds_between_reports(call.config.max_nodes, _REPORT_SECONDS)
        )
        try:
            return self._job.run()
        finally:
            self._report(reporter.last())

    def _report(self, report: NodeReport) -> None:
        # Without reports the client knows less, and the job runs all the same.
        with contextlib.suppress(OSError):
            self._folder.write(report_name(*self._place()), report.packed())

    def _config(self, call: Call) -> LaunchConfig:
        """Return the settings of this node's launch, with those that its step has."""
        least = call.config.min_nodes
        config = evolve(call.config, min_nodes="all", max_nodes=1, token=self._folder.token, **settings_on_node(call))
        filled, _ = with_all_nodes(
            config, os.environ, now=wall_time(), reachable=reachable, kill_wait=partial(kill_wait, os.environ)
        )
        return evolve(filled, min_nodes=least)

    def _listen(self, record: records.Record) -> None:
        match record:
            case records.RoundStarted():
                self._world = record.world_size
            case records.WorkersStopping() | records.WorkersAsked() | records.StopAwaited():
                self._await_kill()

    def _await_kill(self) -> None:
        """Begin to look for the client's request to kill the workers; before a stop, nobody can want that."""
        if self._kill_watch is None:
            self._kill_watch = threading.Thread(target=self._kill_if_requested, name="elasticlib-kill", daemon=True)
            # Without this thread the workers have all of the time that Slurm gives them.
            with contextlib.suppress(StartError):
                start_thread(self._kill_watch)

    def _kill_if_requested(self) -> None:
        while not self._folder.kills():
            sleep(_LOOK_SECONDS)
        assert self._job is not None
        self._job.ask_to_stop("its client waits for the workers no longer", 0)

    def _failed(self, error: BaseException) -> int:
        """Report *error* to Slurm and to the client, and return the exit status."""
        if not isinstance(error, ElasticError):
            self._write(pack_error(error, self._world))
            return 1
        is_requeued = report_end(error, self._exits, os.environ)
        if not is_requeued:
            self._write(pack_error(error, self._world))
            give_allocation_back(error, self._exits, os.environ)
        return exit_status(error, self._exits)

    def _place(self) -> tuple[int, int]:
        """Return the restarts of the job before this run, and the number of this node."""
        return self._context.restart_count, self._context.node_rank or 0

    def _write(self, packed: bytes) -> None:
        name = result_name(*self._place())
        try:
            self._folder.write(name, packed)
        except OSError as error:
            where, reason = self._folder.file(name), error.strerror or error
            raise ElasticError(f"the outcome of this node cannot be written to {where}: {reason}") from None


if __name__ == "__main__":
    main()
