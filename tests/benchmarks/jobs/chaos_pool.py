"""A program with a pool for the chaos campaign: calls and pauses in turn; a call that fails is made again."""

import os
import sys
import time

import elasticlib
from tests.benchmarks import journal

CALLS, PACE = 6, 0.1


def work(store: bool) -> int:
    """A call; with the store of the pool's process group, where that is wanted."""
    (journal.folder() / f"worker.{journal.rank()}").write_text(str(os.getpid()))
    journal.mark("up")
    if store:
        import torch.distributed as dist

        dist.barrier()
    journal.hold("training")
    time.sleep(PACE)  # stands for work
    return os.getpid()


if __name__ == "__main__":
    store = "store" in sys.argv
    preload = ("torch",) if store else ()
    failed = 0
    with elasticlib.pool(2, group="shared" if store else None, preload=preload) as pool:
        for _ in range(CALLS):
            try:
                pool.run(work, store)
            except elasticlib.ChildFailedError as error:
                print(f"call failed: {error}", file=sys.stderr, flush=True)
                failed += 1
                pool.run(work, store)
            time.sleep(PACE)  # the program does something else
        os.environ.update(RANK="0", TORCHELASTIC_RESTART_COUNT=str(failed))
        journal.mark("ending")
        journal.hold("end")
        time.sleep(PACE)  # stands for a last evaluation
    journal.mark("done")
