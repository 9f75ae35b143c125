"""
A node's request to the server that hosts its store: to coordinate the node's job.

Rules of this file: one request and one answer on the node's own connection. What keeps the server from answering is
a `RendezvousConnectionError`, so that the node tries again.
"""

from __future__ import annotations

import secrets

from elasticlib.errors import ConfigError, RendezvousClosedError, RendezvousConnectionError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, Exchange
from elasticlib.rendezvous.serving._requests import (
    MARK,
    NO_JOB,
    Message,
    OpenDeclined,
    Opened,
    OpenJob,
    ServerMark,
    answer_key,
    decode,
    encode_request,
)
from elasticlib.rendezvous.stores._torch_store import StoreExchange

ANSWER = 10.0
"""Seconds within which a server that is not stopped has answered, however busy it is."""


def server_of(exchange: Exchange) -> str | None:
    """
    Return the name of the server that coordinates the jobs in this store; None if their nodes do.

    Raises `RendezvousConnectionError` for a mark that cannot be read: the server writes it again.
    """
    if not isinstance(exchange, StoreExchange):
        return None
    [data] = exchange.of(NO_JOB).read([MARK])
    if data is None:
        return None

    mark = _read(data, exchange.where)
    if not isinstance(mark, ServerMark):
        raise RendezvousConnectionError(f"the mark of the server at {exchange.where} was overwritten")
    return mark.name


def open_job(exchange: Exchange, job: NodeJob, limit: float = ANSWER) -> None:
    """
    Make the server coordinate *job*.

    Raises `RendezvousClosedError` with its reason if it declines, `RendezvousConnectionError` if it does not answer
    within *limit* seconds.
    """
    assert isinstance(exchange, StoreExchange)
    if job.backend == "static":
        raise ConfigError.of_setting(
            "rdzv_backend",
            f"'static': elasticrun serve hosts the store at {exchange.where}, and under static node 0 must: give c10d",
        )

    desk = exchange.of(NO_JOB)
    word = secrets.token_hex(8)
    desk.post(encode_request(_request(job, word), key_of(job.token) if job.token else None))
    answer = _answer(desk, word, limit)
    if isinstance(answer, OpenDeclined):
        raise RendezvousClosedError(
            f"the server at {exchange.where} does not coordinate job {job.run_id!r}: {answer.why}"
        )

    if not exchange.wait(ANNOUNCEMENT, limit):
        # The job has just ended: the next request begins a new one.
        raise RendezvousConnectionError(f"the server at {exchange.where} has ended job {job.run_id!r}")


def _request(job: NodeJob, word: str) -> OpenJob:
    try:
        return OpenJob(word, job.node, job.run_id, job.rules, job.close_timeout, is_known=job.sidecars > 0)
    except ValueError as error:
        raise ConfigError(f"job {job.run_id!r:.80} cannot use the server at {job.endpoint}: {error}") from error


def _answer(desk: StoreExchange, word: str, limit: float) -> Opened | OpenDeclined:
    key = answer_key(word)
    if not desk.wait(key, limit):
        raise RendezvousConnectionError(f"the server at {desk.where} did not answer within {limit:g} s: is it stopped?")

    [data] = desk.read([key])
    desk.delete([key])
    answer = _read(data or b"", desk.where)
    if not isinstance(answer, (Opened, OpenDeclined)):
        raise RendezvousConnectionError(f"the answer of the server at {desk.where} was overwritten")
    return answer


def _read(data: bytes, where: str) -> Message:
    try:
        return decode(data)
    except ValueError as error:
        raise RendezvousConnectionError(f"the server at {where} wrote {data[:40]!r}: {error}") from error
