"""A worker of the chaos campaign: it comes up, trains for a while (with the round's store), and ends."""

import os
import subprocess
import sys
import time

from tests.benchmarks import journal

STEPS, PACE = 10, 0.1

if __name__ == "__main__":
    store = None
    if "store" in sys.argv:
        from torch.distributed import TCPStore

        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if "detaches" in sys.argv:
        upload = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (journal.folder() / f"detached.{journal.attempt()}.{journal.rank()}").write_text(str(upload.pid))
    (journal.folder() / f"worker.{journal.rank()}").write_text(str(os.getpid()))
    journal.mark("up")
    journal.hold("training")
    for step in range(STEPS):
        if store is not None:
            store.add(f"step {step}", 1)
        time.sleep(PACE)  # stands for a step of a training
    journal.mark("ending")
    journal.hold("end")
    time.sleep(2 * PACE)  # stands for a last checkpoint
    journal.mark("done")
