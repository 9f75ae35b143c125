"""
The jobs of a server, and its decisions about requests for them. Pure.

    no job of this id --OpenJob--> hosted --the job ends--> ending --all nodes have read it--> no job of this id

Rules of this file: a request that repeats changes nothing. A job keeps the token of its first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import Factory, evolve, field, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._shortening import LINE, SHORT, cut
from elasticlib.rendezvous.serving._requests import OpenJob, key_that_signed, read_request
from elasticlib.spec import TOKEN_VARIABLE


@frozen
class Begin:
    """Coordinate a new job, whose messages are signed with *key*, and then answer."""

    request: OpenJob
    key: bytes | None = field(repr=False)


@frozen
class Admit:
    """Answer that the server coordinates the job."""

    request: OpenJob


@frozen
class Decline:
    """Answer that the server does not coordinate the job, for this reason."""

    request: OpenJob
    why: str


@frozen
class Drop:
    """Log that an entry is not a request; it names nobody to answer."""

    why: str


Decision: TypeAlias = Begin | Admit | Decline | Drop


@frozen
class JobTable:
    """The jobs that a server coordinates, *most* at once, for nodes with one of its *keys*."""

    most: int
    keys: Sequence[bytes | None] = field(repr=False)
    """Keys of the tokens that jobs may have; None: a job may have none."""
    hosted: Mapping[str, bytes | None] = field(default=Factory(dict), repr=False)
    """The key of each job."""

    def receive(self, data: bytes, ended: Mapping[str, str]) -> tuple[Self, Decision]:
        """
        Return the next table and the decision about the request in *data*.

        *ended* has the jobs that are over and still hosted, each with the reason.
        """
        try:
            request = read_request(data)
        except ValueError as error:
            return self, Drop(cut(f"{data[:40]!r} is not a request: {error}", LINE))

        key, is_signed_well = key_that_signed(data, self.keys)
        why = self._refusal_of_token(is_signed_well) or self._refusal_of_job(request, key, ended)
        if why:
            return self, Decline(request, why)
        if request.run_id in self.hosted:
            return self, Admit(request)

        return evolve(self, hosted={**self.hosted, request.run_id: key}), Begin(request, key)

    def without(self, run_id: str) -> Self:
        """Return the table without that job, whose id is free again."""
        return evolve(self, hosted={each: key for each, key in self.hosted.items() if each != run_id})

    def _refusal_of_token(self, is_signed_well: bool) -> str:
        if is_signed_well:
            return ""
        has_token = None not in self.keys
        trouble = "the job does not have its token" if has_token else "the job has another token than the server"
        return f"{trouble}: set {TOKEN_VARIABLE} to the same secret for the server and for all nodes"

    def _refusal_of_job(self, request: OpenJob, key: bytes | None, ended: Mapping[str, str]) -> str:
        run_id = request.run_id
        named = repr(cut(run_id, SHORT, 0.75))
        if run_id not in self.hosted:
            return self._refusal_of_one_more()
        if self.hosted[run_id] != key:
            return f"job {named} has another token: set {TOKEN_VARIABLE} to the same secret for all nodes"
        # A node of the job has yet to read how it ended; a new node would be too late.
        if run_id in ended and not request.is_known:
            return f"job {named} had ended: {ended[run_id]}"
        return ""

    def _refusal_of_one_more(self) -> str:
        if len(self.hosted) < self.most:
            return ""
        return f"it hosts {len(self.hosted)} jobs already: start it with a larger --max-jobs"
