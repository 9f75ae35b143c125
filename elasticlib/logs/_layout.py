"""
Names of log folders and files, and the destination of each worker's streams.

Rules of this file: pure; it computes paths and does not access them. A worker's folder is
``<base>/<run id>_<random>/attempt_<restart count>/<local rank>/``. A tee'd stream is a redirected one
whose lines also go to the console. The filter of local ranks affects only the console: it never removes
a file.
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
    """Return the name of a launch's folder up to its random part; invalid characters become ``_``."""
    return (re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:_LONGEST_RUN_NAME] or "run") + "_"


def attempt_names(restart_count: str) -> Iterator[str]:
    """
    Yield names for the folder of one round; the caller takes the first that is free.

    These are ``attempt_0``, then ``attempt_0.1``, ``attempt_0.2``. A round after a change of members has the
    restart count of the round before it, and must not destroy that round's logs.
    """
    name = "attempt_" + re.sub(r"[^A-Za-z0-9._-]", "_", restart_count)
    yield name
    yield from (f"{name}.{again}" for again in itertools.count(1))


def line_prefix(template: str, *, role_name: str, rank: int, local_rank: int, hostname: str) -> bytes:
    """Return the prefix of a worker's console lines; unknown names in *template* stay unchanged."""
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
    Return the paths of one round below *folder*; with None no file is written, and nothing is redirected.

    A rank outside the filter writes to `os.devnull` the streams that have no file. A filter of None, or an
    empty one, accepts all ranks.
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
    """Add a file to *plan* for each stream that goes to a file, or to file and console."""
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
    """Keep the output of *rank* off the console."""
    plan.tee_stdouts.pop(rank, None)
    plan.tee_stderrs.pop(rank, None)
    plan.stdouts.setdefault(rank, os.devnull)
    plan.stderrs.setdefault(rank, os.devnull)


def destinations_of(dest: object) -> LogsDest:
    """
    Return the result of any specification, also one written for torch, as our `LogsDest`.

    Other specifications use an empty path for a stream on the console, and `os.devnull` for a tee or an
    error file that does not exist. Their own classes may lack newer fields.
    """

    def paths(name: str) -> dict[int, str]:
        return {rank: os.fspath(path) for rank, path in (getattr(dest, name, None) or {}).items() if path}

    def filtered(name: str) -> str:
        path = os.fspath(getattr(dest, name, None) or "")
        # torch joins its null folder with the name of the file: no such path can exist.
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
