"""
The output of a background job: one file for each worker, which can be read while it grows.

Rules of this file: stdout and stderr of a worker go to one file, in their order. Rank 0 also writes
to the console. The files stay as long as the job's object, and after a failure they stay for the
user. Workers that their pool has stopped have not failed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence

from elasticlib import records
from elasticlib.errors import ConfigError
from elasticlib.logs import DefaultLogsSpecs, warn_of_strange_ranks
from elasticlib.notebook import ipython_shell
from elasticlib.spec import LaunchConfig, LogsDest, LogsSpecs, Std
from elasticlib.stacks import ranks_text

logger = logging.getLogger(__name__)


class JobLogs(DefaultLogsSpecs):
    """
    Output files of a job without `LaunchConfig.logs_specs`; the console shows the ranks *show* (None: all).

    If several ranks are shown, a short prefix on each line names its rank.
    """

    def __init__(self, show: Collection[int] | None = (0,)) -> None:
        super().__init__(redirects=Std.ALL)
        # The job's object reads and removes the files.
        self.keeps_streams = False
        self._show = show
        self.default_prefix = "" if show is not None and len(show) <= 1 else "[${rank}] "

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Make the folders of one round, with one file for each rank, and return its paths."""
        dest = super().reify(envs)
        for rank, path in dest.stderrs.items():
            # One file for both streams keeps their order.
            os.unlink(path)
            dest.stderrs[rank] = dest.stdouts[rank]
        shown = {rank for rank, env in envs.items() if self._show is None or int(env["RANK"]) in self._show}
        dest.tee_stdouts = {rank: path for rank, path in dest.stdouts.items() if rank in shown}
        return dest

    def temporary_round(self) -> str:
        """Return "": the agent may not remove the folder, since the job's object does."""
        return ""

    def remove_if_temporary(self, only_if_empty: bool = False) -> None:
        """Remove the logs only with *only_if_empty*: after success the job's object still reads them."""
        if only_if_empty:
            super().remove_if_temporary(only_if_empty)


def shows_errors_in_cell(config: LaunchConfig) -> bool:
    """Return True if a notebook's cell shows the exceptions of workers: no ``logs_specs`` of the user takes them."""
    return ipython_shell() is not None and config.logs_specs is None


def own_logs(config: LaunchConfig, keeps_all: bool) -> LogsSpecs:
    """
    Return the caller's `logs_specs`, else `JobLogs` if *keeps_all* or `show` is set, else the default.

    Raises `ConfigError` if both `logs_specs` and `show` are set.
    """
    if config.logs_specs is not None:
        if config.show is not None:
            raise ConfigError(
                f"show={config.show!r} has no effect with logs_specs: leave show out, and set tee in logs_specs"
            )
        return config.logs_specs
    if not keeps_all and config.show is None:
        return DefaultLogsSpecs()
    return JobLogs(shown_ranks(config))


def announce_log_folder(logs: LogsSpecs) -> None:
    """Log the temporary folder with the streams that the caller requested, so that the user finds it."""
    if isinstance(logs, DefaultLogsSpecs) and (folder := logs.kept_temporary_folder()):
        records.log(records.StreamsKept(folder))


def remove_logs(logs: LogsSpecs, requested: LogsSpecs, *, succeeded: bool, is_kept: bool) -> None:
    """
    Remove logs that are not needed after a launch, and note the folder in the *requested* specs.

    *is_kept*: unless the workers have *succeeded*, log the folder of the files that stay.
    """
    if isinstance(logs, DefaultLogsSpecs) and isinstance(requested, DefaultLogsSpecs):
        # The folder of a launch that failed before its first round is empty.
        logs.forget_unused()
        logs.put_away(succeeded=succeeded)
        requested.note_folder_of(logs)
        # Files that the caller has requested stay even after a pool was stopped on purpose.
        stays = is_kept or not isinstance(logs, JobLogs)
        if stays and not succeeded and logs.root_log_dir:
            records.log(records.LogsKept(logs.root_log_dir))


def shown_ranks(config: LaunchConfig) -> Sequence[int] | None:
    """Return the ranks whose output is shown; None for all."""
    return None if config.show == "all" else (0,) if config.show is None else tuple(config.show)


def warn_of_ranks(logs: LogsSpecs, workers: int, config: LaunchConfig) -> None:
    """Warn of ranks that *logs* or ``show`` names, but that a node with *workers* workers does not have."""
    warn_of_strange_ranks(logs, workers)

    # Other nodes of the job may have these ranks.
    if config.max_nodes == 1:
        warn_of_shown_ranks(config, workers)


def warn_of_shown_ranks(config: LaunchConfig, workers: int) -> None:
    """Warn of ranks that ``show`` names, but that a job with at most *workers* workers does not have."""
    shown = set(shown_ranks(config) or ())
    strange = {rank for rank in shown if rank >= workers}
    if not strange:
        return

    effect = "no output is shown" if strange == shown else "that has no effect here"
    logger.warning(
        "show=%r names %s, but this job has only %s: %s",
        config.show,
        ranks_text(strange),
        ranks_text(range(workers)),
        effect,
    )
