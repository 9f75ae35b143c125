"""
The fork of a worker in the spawner.

Rules of this file: of the spawner's descriptors, the worker holds only those that are handed to
it.
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
    """
    From now on start each worker that runs Python as a new interpreter.

    This process has not run the start hooks that a worker needs.
    """
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
    Fork a worker, and return its process id.

    *modules_files* are descriptors that modules opened at import. If the caller itself was
    forked, to run *call*, *drop* are the descriptors that the worker must not hold.
    """
    left = [*handed.left(), handed.notices, handed.release]
    keep = {*left, *modules_files, *handed.memories.values()}
    memories: list[int] = []
    if spec.fresh or (_all_fresh and spec.kind != "program"):
        # A new interpreter finds its order in memory that it inherits.
        handed = replace(handed, inherit=[*left, *handed.memories.values()])
        memories = files_with_content(dumps(both(spec, handed)).encode(), "start spec")
        handed = replace(handed, inherit=[*handed.inherit, *memories])
        keep.update(memories)
        spec = replace(spec, kind="program", argv=[*spec.python, ",".join(map(str, memories))])
    elif spec.kind == "program":
        # A program that is executed does not need the files of modules.
        keep -= set(modules_files)

    # torch's multiprocessing is the standard one with reducers for tensors.
    torchs: Any = sys.modules.get("torch.multiprocessing")
    context = (torchs or multiprocessing).get_context("fork")
    facts = (spec, handed, os.getpid(), keep, drop, call)
    worker = context.Process(target=_child.run_forked, args=facts)

    # Otherwise the worker would write the buffered text a second time.
    sys.stdout.flush()
    worker.start()

    # The spawner itself reaps, after the group was killed: multiprocessing must not be first.
    multiprocessing_process._children.discard(worker)  # type: ignore[attr-defined]
    close_each(memories)
    return int(worker.pid)
