"""A worker that tells its step and writes a line for each: as many as the command line says, so many seconds apart."""

import os
import sys
import time

from elasticlib import progress

count, pause = int(sys.argv[1]), float(sys.argv[2])
rank = int(os.environ["RANK"])
due = time.monotonic()
for step in range(count):
    progress(step + 1, total=count, loss=1 / (step + 1))
    print(f"rank {rank}: step {step} of {count}, loss {1 / (step + 1):.6f}", flush=True)
    if pause:
        due += pause
        time.sleep(max(0.0, due - time.monotonic()))
