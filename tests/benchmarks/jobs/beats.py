"""A worker that writes the time every 50 ms, as often as the command line says."""

import sys
import time

for _ in range(int(sys.argv[1])):
    sys.stdout.write(f"beat {time.monotonic()!r}\n")
    sys.stdout.flush()
    time.sleep(0.05)
