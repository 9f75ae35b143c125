"""A node that launches a function and prints its results: ``ENDPOINT FOLDER (host|other)``; its log is on stderr."""

import json
import logging
import os
import sys
from pathlib import Path

from elasticlib import LaunchConfig, elastic_launch, records
from tests.process.duties import wait_until

endpoint, folder, part = sys.argv[1:]


def work(go: Path) -> str:
    """The host's worker ends when it may, the other one at once, with how often they ran."""
    with (go.parent / os.environ["RANK"]).open("a") as runs:
        runs.write("I")
    if os.environ["GROUP_RANK"] == "0":
        wait_until(go.exists, seconds=60.0)
    return f"result {(go.parent / os.environ['RANK']).read_text()} of rank {os.environ['RANK']}"


logging.basicConfig(level=records.FINE, format="%(message)s")
config = LaunchConfig(
    min_nodes=2,
    max_nodes=2,
    nproc_per_node=1,
    run_id="job",
    rdzv_backend="c10d",
    rdzv_endpoint=endpoint,
    rdzv_configs={"heartbeat_timeout": 2, "is_host": part == "host"},
    max_restarts=0,
    preload=(),
)
print(json.dumps(elastic_launch(config, work)(Path(folder) / "go")), flush=True)
