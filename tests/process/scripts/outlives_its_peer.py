"""Of two ranks on two nodes the second uses the store after the first, whose node hosts it, has ended."""

import os
import sys
import time
from datetime import timedelta

from torch.distributed import TCPStore

address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))
if os.environ["RANK"] == "0":
    store.set("process", str(os.getpid()))
    store.get("was read")
    sys.exit()
first = int(store.get("process"))
store.set("was read", "")
while os.path.exists(f"/proc/{first}"):
    time.sleep(0.01)
for _ in range(20):
    store.add("steps", 1)
    time.sleep(0.05)  # stands for a step
print("all steps", flush=True)
