"""
Frames on the pipes between a client and its agents. Pure.

A frame is a kind (one byte), a length (8 bytes, big-endian) and that many bytes. Before the first frame to the client
stands `MAGIC`: a login shell may print text before it.

Rules of this file: a reader gets any bytes in any parts. It returns frames within bounds, or raises a ValueError.
"""

from __future__ import annotations

import enum
import struct

from elasticlib._untrusted import parse
from elasticlib.engines._protocol import AgentOutput, AgentReport, AgentResult, AgentUp, EngineEvent

MAGIC = b"\x00elasticlib agent 1\n"
LARGEST = 64 * 2**20
"""Maximum number of bytes in a frame."""
_LONGEST_GREETING = 2**16
_SHOWN = 80
"""Bytes of other text that an error shows."""
_HEAD = struct.Struct(">BQ")


class Kind(enum.IntEnum):
    """Kinds of frames."""

    # To an agent.
    CALL = 1
    """The versions of the client, and the pickled call."""
    BEGIN = 2
    """Settings of the job, as JSON: the agent starts its node."""
    BEAT = 3
    """Nothing: the client is still in contact."""
    STOP = 4
    """Seconds from SIGTERM to SIGKILL, as JSON: the agent stops its workers and ends."""
    ASK = 5
    """A question about the node's workers, as JSON; the agent sends an ANSWER."""
    NOTICE = 6
    """Why the machine of the agent will end and in how many seconds, as JSON: its workers save, and it leaves."""
    # To the client.
    UP = 11
    """The agent's address, as JSON."""
    OUTPUT = 12
    RESULT = 13
    REPORT = 14
    """The status of the node's workers, as JSON."""
    ANSWER = 15


def frame(kind: Kind, data: bytes = b"") -> bytes:
    """Return one frame. Raises ValueError if *data* is too large."""
    if len(data) > LARGEST:
        raise ValueError(f"{len(data)} bytes are more than the maximum of {LARGEST}")
    return _HEAD.pack(kind, len(data)) + data


def event_of(place: int, agent: int, kind: Kind, content: bytes) -> EngineEvent:
    """Return the event of a frame from an *agent* at *place*. Raises ValueError for any other frame."""
    if kind is Kind.UP:
        return AgentUp(place, _address_in(content), agent)
    if kind is Kind.OUTPUT:
        return AgentOutput(place, content, agent)
    if kind is Kind.RESULT:
        return AgentResult(place, content, agent)
    if kind in (Kind.REPORT, Kind.ANSWER):
        return AgentReport(place, content, agent, is_answer=kind is Kind.ANSWER)
    raise ValueError(f"an agent does not send {kind.name}")


def _address_in(content: bytes) -> str:
    """Return the address of an agent. Raises ValueError."""
    try:
        return str(parse(content)["address"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"an agent does not give its address: {error}") from error


class FrameReader:
    """Frames of a stream of bytes; with *greeted*, text may stand before the first one."""

    def __init__(self, *, greeted: bool) -> None:
        self._awaits_magic = greeted
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """Return the frames that *data* completes. Raises ValueError for bytes that are not frames."""
        self._bytes += data
        if self._awaits_magic and not self._skip_greeting():
            return []

        found = []
        while (each := self._next()) is not None:
            found.append(each)
        return found

    def _skip_greeting(self) -> bool:
        """Remove all up to `MAGIC`; return False while that is still missing."""
        place = self._bytes.find(MAGIC)
        if place < 0:
            if len(self._bytes) > _LONGEST_GREETING:
                text = bytes(self._bytes[:_SHOWN]).decode(errors="replace")
                raise ValueError(f"the machine writes other text than an agent's: {text!r}...")
            return False
        del self._bytes[: place + len(MAGIC)]
        self._awaits_magic = False
        return True

    def _next(self) -> tuple[Kind, bytes] | None:
        if len(self._bytes) < _HEAD.size:
            return None

        number, length = _HEAD.unpack_from(self._bytes)
        kind = self._kind(number)
        if length > LARGEST:
            raise ValueError(f"a frame of {length} bytes is larger than the maximum of {LARGEST}")

        end = _HEAD.size + length
        if len(self._bytes) < end:
            return None
        data = bytes(self._bytes[_HEAD.size : end])
        del self._bytes[:end]
        return kind, data

    def _kind(self, number: int) -> Kind:
        try:
            return Kind(number)
        except ValueError:
            is_greeting = self._bytes.startswith(MAGIC[: _HEAD.size])
            fix = "use FrameReader(greeted=True)" if is_greeting else "nothing but the agent may write to its output"
            raise ValueError(f"no frame begins with {bytes(self._bytes[: _HEAD.size])!r}: {fix}") from None
