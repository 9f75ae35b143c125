"""Which Pythons are promised, and where they are on this machine."""

from __future__ import annotations

import configparser
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLASSIFIER = re.compile(r"Programming Language :: Python :: (3\.\d+)")


def settings() -> configparser.ConfigParser:
    """The project's own ``setup.cfg``."""
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    return parsed


def promised() -> list[str]:
    """The versions of Python that ``setup.cfg`` names, oldest first."""
    found = CLASSIFIER.findall(settings()["metadata"]["classifiers"])
    return sorted(found, key=lambda version: int(version.partition(".")[2]))


def find(version: str) -> Path | None:
    """An interpreter of *version* (``3.10``): on ``PATH``, or pyenv's; None where there is none."""
    # pyenv's versions first: its shims on `PATH` start nothing for a version that is not switched on.
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    if kept:
        return kept[-1]
    there = shutil.which(f"python{version}")
    return Path(there) if there else None
