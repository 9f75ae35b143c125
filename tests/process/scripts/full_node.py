"""A node that finds no room for its logs only when it has its ranks, as layouts of other people's may do."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping

from elasticlib import LaunchConfig, LogsSpecs, elastic_launch
from elasticlib.spec import LogsDest


class Full(LogsSpecs):
    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/logs")

    @property
    def root_log_dir(self) -> str:
        return ""


if __name__ == "__main__":
    config = LaunchConfig(
        1,
        2,
        1,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint=sys.argv[1],
        rdzv_configs={"wait_for": "min", "heartbeat_timeout": float(sys.argv[2])},
        max_restarts=0,
        logs_specs=Full(),
    )
    elastic_launch(config, sys.executable)("-c", sys.argv[3])
