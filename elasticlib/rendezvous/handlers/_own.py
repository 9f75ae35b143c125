"""
Makes handlers of our own back ends from torch's parameters.

Rules of this file: what is wrong is said here, by the name of the parameter; nothing is contacted.
"""

from __future__ import annotations

import logging
import os

from elasticlib._rules import is_unicode
from elasticlib.errors import ConfigError
from elasticlib.rendezvous import _options
from elasticlib.rendezvous._choice import scheduler_index
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous.handlers._base import RendezvousParameters
from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler
from elasticlib.rendezvous.net._endpoint import parse_rendezvous_endpoint
from elasticlib.spec import TOKEN_VARIABLE

_log = logging.getLogger("elasticlib")


def job_of(params: RendezvousParameters, backend: str, *, token: str | None = None, index: int | None = None) -> Job:
    """What *params* ask for with that *backend*; options without effect are named in a warning."""
    options = _options.read(backend, params.config)
    for why in options.idle:
        _log.warning(why)
    return Job.of(
        options,
        run_id=params.run_id,
        node=node_name(params.local_addr),
        backend=backend,
        endpoint=params.endpoint,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        wait_for=options.wait_for or "quiet",
        node_rank=options.rank if backend == "static" else index,
        token=token,
        local_addr=params.local_addr,
    )


def create_handler(params: RendezvousParameters) -> CoordinatedHandler:
    """
    The handler of *params* for one of our own back ends; nothing is contacted yet.

    Raises `ConfigError` for whatever breaks a rule; options without effect are named in a warning.
    """
    token, index = os.environ.get(TOKEN_VARIABLE) or None, scheduler_index(os.environ)
    job = job_of(params, params.backend, token=token, index=index)
    if job.backend == "static":
        _check_static(params, job.node_rank)
    elif not params.run_id:
        raise ConfigError(f"run_id={params.run_id!r}: nodes find each other's job by its id: give the same one to all")
    if not is_unicode(params.run_id):
        raise ConfigError(f"run_id={params.run_id!r} must be text that can be written in UTF-8")
    return CoordinatedHandler(job)


def _check_static(params: RendezvousParameters, rank: int | None) -> None:
    if rank is None or not 0 <= rank < params.max_nodes:
        last = params.max_nodes - 1
        raise ConfigError(f"rank={rank}: with rdzv_backend='static' each node needs its own, from 0 to {last}")
    ports = {parse_rendezvous_endpoint(params.endpoint, default)[1] for default in (1, 2)}
    if not params.endpoint.strip() or len(ports) > 1 or ports == {0}:
        raise ConfigError(f"endpoint={params.endpoint!r}: rdzv_backend='static' needs host:port, such as node0:29500")
