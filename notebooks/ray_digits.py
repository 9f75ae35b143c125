"""
Train the digits of `train_digits.py` on three nodes of a Ray cluster, with a worker that is killed on purpose:

    python ray_digits.py --checkpoint-dir SHARED

SHARED is a new folder on a disk that all nodes have. The killed worker's group is started again, resumes from the
newest checkpoint, and ends with the accuracy of a run without the loss (``--fail-rank -1``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from train_digits import train

from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Ray

NODES, BUNDLE = 3, {"CPU": 1}  # with GPUs: {"GPU": 8}


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits, on three nodes of a Ray cluster.")
    parser.add_argument("--checkpoint-dir", required=True, help="new folder on a disk that all nodes have")
    parser.add_argument("--fail-rank", type=int, default=1, help="worker that kills itself in epoch 3 (%(default)s)")
    given = parser.parse_args()

    config = LaunchConfig(1, NODES, nproc_per_node="auto", max_restarts=1)
    launch = elastic_launch(config, train, on=Ray(nodes=NODES, bundle=BUNDLE))
    results = launch(Path(given.checkpoint_dir).absolute(), fail_rank=given.fail_rank, fail_epoch=3)
    print(f"accuracy on all ranks: {sorted({result['accuracy'] for result in results.values()})}")


if __name__ == "__main__":
    main()
