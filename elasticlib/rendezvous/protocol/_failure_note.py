"""A failed worker as messages carry it. Pure."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from elasticlib.rendezvous.protocol._codec import Lines


@frozen
class FailureNote:
    """One worker that failed, as far as peers need to know."""

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    """Exit status; ``-n`` when signal ``n`` ended the worker."""
    message: Lines = ""
    exception_type: str = ""
    traceback: Lines = ""
    hint: Lines = ""
    secondary: bool = False
    """True for a lost connection to a peer: most likely a consequence of another failure."""
    age: float = field(default=0.0, validator=ge(0))
    """Seconds between the failure and the sending of this note."""
    fatal: bool = False
    """True where a restart would only meet it again: the job ends, whatever restarts are left."""
    process: str = ""
    """Which process of elasticlib's own ended; empty: a worker. `rank` stands for it then."""
    cut: bool = False
    """True where texts were left out, and more of them can be had: from its node, or where the root cause lies."""
