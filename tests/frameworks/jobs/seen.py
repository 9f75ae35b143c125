"""Launcher facts from torch and the environment; the last rank may fail under torch's `record`."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main(folder, fails="0"):
    """Write what is seen; raise in the last rank where told to."""
    environment = {name: value for name, value in os.environ.items() if name.isupper()}
    dist.init_process_group("gloo")
    seen = {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "launched": dist.is_torchelastic_launched(),
        "local_rank": dist.get_node_local_rank(),
        "arguments": sys.argv[1:],
        "file_of_main": os.path.basename(sys.modules["__main__"].__file__),
        "environment": environment,
    }
    Path(folder, f"rank{seen['rank']}.json").write_text(json.dumps(seen))
    dist.barrier()
    if int(fails) and seen["rank"] == seen["world"] - 1:
        raise ValueError("no such digit: 11")
    dist.destroy_process_group()  # left to the interpreter's end, torch's threads abort the process now and then


if __name__ == "__main__":
    main(*sys.argv[1:])
