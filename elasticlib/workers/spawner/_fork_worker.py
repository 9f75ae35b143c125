"""
The fork that a worker begins with, in the spawner.

Rules of this file: the worker holds what is handed to it and nothing else of the spawner's.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from json import dumps
from multiprocessing import process as multiprocessing_process
from typing import Any

from elasticlib.processes import close_each, files_with_content
from elasticlib.workers.child import _child
from elasticlib.workers.child._start_spec import Handed, StartSpec, both

_all_fresh = False


def start_all_fresh() -> None:
    """Have each worker that runs Python be a new interpreter from now on: this process is none as they would be."""
    global _all_fresh
    _all_fresh = True


def fork_worker(
    spec: StartSpec,
    handed: Handed,
    modules_files: Collection[int],
    drop: Collection[int] | None,
    call: Callable[[], Any] | None,
) -> int:
    """
    Fork a worker; its process id.

    *modules_files* are descriptors that modules opened at import. Where the caller itself was forked, to run *call*,
    *drop* is what the worker must not hold.
    """
    left = [*handed.left(), handed.notices, handed.release]
    keep = {*left, *modules_files, *handed.memories.values()}
    memories: list[int] = []
    if spec.fresh or (_all_fresh and spec.kind != "program"):
        # A new interpreter finds what it is to do in memory that it inherits.
        handed = replace(handed, inherit=[*left, *handed.memories.values()])
        memories = files_with_content(dumps(both(spec, handed)).encode(), "start spec")
        handed = replace(handed, inherit=[*handed.inherit, *memories])
        keep.update(memories)
        spec = replace(spec, kind="program", argv=[*spec.python, ",".join(map(str, memories))])
    elif spec.kind == "program":
        # A program that is executed has no use for the files of modules.
        keep -= set(modules_files)
    # torch's multiprocessing is the standard one with tensors taught to it.
    torchs: Any = sys.modules.get("torch.multiprocessing")
    context = (torchs or multiprocessing).get_context("fork")
    facts = (spec, handed, os.getpid(), keep, drop, call)
    worker = context.Process(target=_child.run_forked, args=facts)
    # The worker would write what is in the buffer once more.
    sys.stdout.flush()
    worker.start()
    # The spawner reaps by itself, after the group was killed: multiprocessing must not be first.
    multiprocessing_process._children.discard(worker)  # type: ignore[attr-defined]
    close_each(memories)
    return int(worker.pid)
