"""The batch script of the page *Slurm*, as its readers paste it."""

from __future__ import annotations

import re
from pathlib import Path

import elasticlib

PAGE = Path(elasticlib.__file__).parent / "docs" / "slurm.md"


def script_of_page() -> str:
    """Return the script that trains on four nodes."""
    [script] = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(script)


def call_of_page() -> str:
    """Return the Python file that submits a call."""
    [text] = re.findall(r"```python\n(# call.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(text)
