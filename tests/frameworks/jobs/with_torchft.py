"""
One worker of a replica group of torchft, started as its manual says; says what it saw as JSON in FOLDER.

``with_torchft.py FOLDER STEPS DIES_AT``: the second group dies once, after step DIES_AT. A lighthouse is at
``TORCHFT_LIGHTHOUSE``, the number of the group in ``REPLICA_GROUP_ID``.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main(folder: str, steps: str, dies_at: str) -> None:
    group = int(os.environ["REPLICA_GROUP_ID"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(100 * group + attempt)  # what is alike at the end was learned together, or healed
    model = torch.nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        # Nobody goes ahead alone: a group that died is waited for.
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"group_{group}_",
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    first = None
    while manager.current_step() < int(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 4)
        loss = (wrapped(inputs) - inputs[:, :2]).pow(2).mean()
        loss.backward()
        optimizer.step()
        first = manager.current_step() if first is None else first
        if group == 1 and attempt == 0 and manager.current_step() == int(dies_at):
            os._exit(9)
    seen = {
        "group": group,
        "attempt": attempt,
        "first": first,
        "step": manager.current_step(),
        "weights": [round(value, 6) for value in model.weight.flatten().tolist()],
    }
    Path(folder, f"group{group}.json").write_text(json.dumps(seen))
    manager.shutdown(wait=False)


main(*sys.argv[1:])
