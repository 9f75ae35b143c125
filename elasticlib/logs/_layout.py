"""
Names of the log folders and files, and which stream of which worker goes where.

Rules of this file: pure; it names paths and touches none. A worker's folder is
``<base>/<run id>_<random>/attempt_<restart count>/<local rank>/``. A tee'd stream is a redirected one whose
lines go to the console too. The filter of local ranks rules the console alone: it never takes a file away.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping
from string import Template

from elasticlib.spec import LogsDest, Std, to_map

DEFAULT_PREFIX = "[${role_name}${local_rank}]:"
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
TEMPORARY_BASE = "torchelastic_"

# NAME_MAX is 255 bytes; mkdtemp adds a random part to the run id.
_LONGEST_RUN_NAME = 120


def run_folder_prefix(run_id: str) -> str:
    """The name of a launch's folder up to its random part; whatever a file name cannot hold becomes ``_``."""
    return (re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:_LONGEST_RUN_NAME] or "run") + "_"


def attempt_names(restart_count: str) -> Iterator[str]:
    """
    Names for the folder of one round, to be tried in turn until one is free.

    ``attempt_0``, then ``attempt_0.1``, ``attempt_0.2``: a round that a change of members began has the
    restart count of the round before it, and must not destroy that round's logs.
    """
    name = "attempt_" + re.sub(r"[^A-Za-z0-9._-]", "_", restart_count)
    yield name
    yield from (f"{name}.{again}" for again in itertools.count(1))


def line_prefix(template: str, *, role_name: str, rank: int, local_rank: int, hostname: str) -> bytes:
    """What stands before each console line of one worker; names that are not known stay as they are."""
    text = Template(template).safe_substitute(role_name=role_name, rank=rank, local_rank=local_rank, hostname=hostname)
    return text.encode("utf-8", "surrogateescape")


def destinations(
    folder: str | None,
    local_world_size: int,
    redirects: Std | Mapping[int, Std],
    tee: Std | Mapping[int, Std],
    local_ranks_filter: Collection[int] | None,
) -> LogsDest:
    """
    Plan one round below *folder*; with None there are no files, and nothing is redirected.

    A rank that the filter leaves out writes to `os.devnull` what it does not write to a file. None, or no
    rank at all, lets every rank through.
    """
    to_file, to_both = to_map(redirects, local_world_size), to_map(tee, local_world_size)
    plan = LogsDest()
    if folder is not None:
        _plan_files(plan, folder, to_file, to_both)
    for rank in range(local_world_size):
        plan.error_files[rank] = os.path.join(folder, str(rank), "error.json") if folder is not None else ""
        is_hidden = local_ranks_filter and rank not in local_ranks_filter
        if is_hidden:
            _hide(plan, rank)
    if folder is not None:
        plan.filtered_stdout = os.path.join(folder, "filtered_stdout.log")
        plan.filtered_stderr = os.path.join(folder, "filtered_stderr.log")
    return plan


def _plan_files(
    plan: LogsDest,
    folder: str,
    to_file: Mapping[int, Std],
    to_both: Mapping[int, Std],
) -> None:
    """Give each stream of each rank that goes to a file, or to both, its file."""
    for std, name, files, followed in (
        (Std.OUT, "stdout.log", plan.stdouts, plan.tee_stdouts),
        (Std.ERR, "stderr.log", plan.stderrs, plan.tee_stderrs),
    ):
        for rank in to_file:
            if (to_file[rank] | to_both[rank]) & std:
                files[rank] = os.path.join(folder, str(rank), name)
            if to_both[rank] & std:
                followed[rank] = files[rank]


def _hide(plan: LogsDest, rank: int) -> None:
    """Keep *rank* off the console."""
    plan.tee_stdouts.pop(rank, None)
    plan.tee_stderrs.pop(rank, None)
    plan.stdouts.setdefault(rank, os.devnull)
    plan.stderrs.setdefault(rank, os.devnull)


def destinations_of(dest: object) -> LogsDest:
    """
    What any specification returned, also one written for torch, in our words.

    Elsewhere a stream that stays on the console is an empty path, a tee of nothing is one of `os.devnull`, an error
    file there is none, and a class of its own may lack the newer fields.
    """

    def paths(name: str) -> dict[int, str]:
        return {rank: os.fspath(path) for rank, path in (getattr(dest, name, None) or {}).items() if path}

    def filtered(name: str) -> str:
        path = os.fspath(getattr(dest, name, None) or "")
        return "" if os.path.dirname(path) == os.devnull else path

    def files(name: str) -> dict[int, str]:
        return {rank: path for rank, path in paths(name).items() if path != os.devnull}

    return LogsDest(
        paths("stdouts"),
        paths("stderrs"),
        files("tee_stdouts"),
        files("tee_stderrs"),
        files("error_files"),
        filtered("filtered_stdout"),
        filtered("filtered_stderr"),
    )
