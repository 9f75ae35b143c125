"""
The report of a launch's end to its scheduler: the termination log, and a request to Slurm to run the job again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from elasticlib.cli._verdict import ExitSettings, has_lost_nodes, may_be_requeued, termination_message
from elasticlib.engines import release_after_loss, requeue
from elasticlib.errors import ElasticError, RendezvousGracefulExitError

log = logging.getLogger("elasticlib.run")

_OF_KUBERNETES = "/dev/termination-log"


def report_end(error: ElasticError, settings: ExitSettings, environ: Mapping[str, str]) -> bool:
    """
    Report the end of a launch without success; a report that cannot be made is a warning.

    Return True if the Slurm job is requeued.
    """
    if isinstance(error, RendezvousGracefulExitError):
        return False
    _write(settings.termination_log, termination_message(error))
    return may_be_requeued(error, settings) and _requeue(environ)


def _write(path: str | None, text: str) -> None:
    # Kubernetes makes this file; elsewhere there is none to write to.
    if path is None and not os.access(_OF_KUBERNETES, os.W_OK):
        return
    try:
        with open(path or _OF_KUBERNETES, "w", encoding="utf-8", errors="replace") as file:
            file.write(f"{text}\n")
    except OSError as failure:
        log.warning("the termination log cannot be written: %s", failure)


def _requeue(environ: Mapping[str, str]) -> bool:
    why_not = requeue(environ)
    if why_not:
        log.warning("the job is not requeued: %s", why_not)
    else:
        log.warning("the job is requeued")
    return not why_not


def give_allocation_back(error: ElasticError, settings: ExitSettings, environ: Mapping[str, str]) -> None:
    """
    Give the allocation of a Slurm job back whose script was lost with its machine; Slurm then ends this process.

    This may wait for minutes, until Slurm has noticed the loss.
    """
    if isinstance(error, RendezvousGracefulExitError) or not has_lost_nodes(error):
        return
    command = release_after_loss(environ, settings.engine)
    if command:
        log.warning("the job's script was lost with its machine: %s", command)
