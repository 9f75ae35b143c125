"""Writes down that it was started, and in how large a world; ends when it is told to: FOLDER."""

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
with open(folder / "starts", "a") as starts:
    starts.write(f"{os.environ['RANK']} {os.environ['WORLD_SIZE']} {os.getpid()}\n")
while not (folder / "go").exists():
    time.sleep(0.02)
