"""
Of two ranks on two nodes the second uses the store after the first, whose node hosts it, has ended.

With the number of a signal as argument it sends that to the process of the store in between, in the first round.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))
if os.environ["RANK"] == "0":
    store.set("process", f"{os.getpid()} {os.getppid()}")
    store.get("was read")
    sys.exit()
first, spawner = map(int, store.get("process").split())
store.set("was read", "")
while os.path.exists(f"/proc/{first}"):
    time.sleep(0.01)
if sys.argv[1:] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    (host,) = Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split()
    os.kill(int(host), int(sys.argv[1]))
for _ in range(20):
    store.add("steps", 1)
    time.sleep(0.05)  # stands for a step
print("all steps", flush=True)
