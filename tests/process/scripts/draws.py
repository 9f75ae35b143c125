"""Random numbers of one worker's training, for comparison with those of other workers."""

import json
import os
import random
import sys
import tempfile
import uuid


def drawn() -> dict[str, str]:
    """By source, what this process draws first."""
    import numpy
    import torch
    from torch.utils.data import DataLoader

    shuffled = DataLoader(range(1000), shuffle=True, batch_size=1000)  # type: ignore[arg-type]
    return {
        "torch.initial_seed": str(torch.initial_seed()),
        "torch.rand": str(torch.rand(2).tolist()),
        "dropout": str(torch.nn.functional.dropout(torch.ones(500)).tolist()),
        "initial weights": str(torch.nn.Linear(3, 3).weight.tolist()),
        "DataLoader(shuffle=True)": str(next(iter(shuffled)).tolist()[:20]),
        "DataLoader's base seed": str(torch.empty((), dtype=torch.int64).random_().item()),
        "random": str(random.random()),
        "numpy.random": str(numpy.random.rand()),
        "numpy.random.default_rng": str(numpy.random.default_rng().random()),
        "tempfile": os.path.basename(tempfile.mktemp()),
        "uuid": str(uuid.uuid4()),
        "os.urandom": os.urandom(8).hex(),
    }


if __name__ == "__main__":
    path = os.path.join(sys.argv[1], uuid.uuid4().hex)
    with open(path + ".part", "w") as file:
        json.dump(drawn(), file)
    os.rename(path + ".part", path + ".json")  # a peer's failure may end this process at any time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        raise SystemExit(3)
