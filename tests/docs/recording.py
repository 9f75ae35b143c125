"""
The recording that README shows: a worker is killed, and the run goes on from its newest checkpoint.

``python -m tests.docs.recording`` runs the command in a terminal, keeps the output with its times in
``elasticlib/docs/restart.cast`` (asciicast, version 2), and draws ``elasticlib/docs/restart.svg`` from that.
``--draw`` only draws it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
CAST = ROOT / "elasticlib" / "docs" / "restart.cast"
SVG = CAST.with_suffix(".svg")
SCRIPT = "train_digits.py"
COMMAND = f"elasticrun --nproc-per-node 2 --max-restarts 1 {SCRIPT} --fail-rank 1 --fail-epoch 3"
COLUMNS = 100
_HOST = "node0"
_LIMIT = 300.0


def record() -> str:
    """Run the command and return its output as an asciicast: a header, then one line for each piece of output."""
    header = {"version": 2, "width": COLUMNS, "height": 24, "command": COMMAND}
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        shutil.copy(ROOT / "notebooks" / SCRIPT, folder)
        lines = [json.dumps(header), *map(json.dumps, _output(folder))]
    return "\n".join(lines) + "\n"


def _output(folder: str) -> Iterator[list[object]]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": str(COLUMNS)}
    began = time.monotonic()
    child = pexpect.spawn(
        COMMAND,
        cwd=folder,
        env=environment,
        dimensions=(24, COLUMNS),
        encoding="utf-8",
        timeout=_LIMIT,
    )
    for line in child:
        yield [round(time.monotonic() - began, 3), "o", line.replace(os.uname().nodename, _HOST)]
    child.close()
    if child.exitstatus != 0:
        raise SystemExit(f"{COMMAND}: exit status {child.exitstatus}")


def drawn(cast: str) -> str:
    """Return the SVG of an asciicast: the command, and each line of its output after the second in which it came."""
    header, *events = map(json.loads, cast.splitlines())
    console = Console(record=True, width=header["width"] + 30, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {header['command']}", style="bold"))
    for seconds, _, text in events:
        line = Text.from_ansi(text.rstrip("\r\n"))
        if text.startswith("W "):
            line.stylize("bold red")
        elif text.startswith("resumed"):
            line.stylize("bold green")
        console.print(Text(f"{seconds:5.1f} s ", style="bright_black") + line)
    return console.export_svg(title="a worker is killed; the job goes on", unique_id="restart")


def main() -> None:
    """Record the command and draw the recording."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.recording", description=main.__doc__)
    parser.add_argument("--draw", action="store_true", help="draw the recording that exists")
    if not parser.parse_args().draw:
        CAST.write_text(record(), encoding="utf-8")
    SVG.write_text(drawn(CAST.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
