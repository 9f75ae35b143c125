"""
What the health check says to one client: as much of HTTP as a probe speaks. Pure.

Rules of this file: bytes in, bytes out; whatever a client says gets one short answer, or none yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

REQUEST_LIMIT = 5.0
"""Seconds that a client may take for its whole question."""
LONGEST = 16384
"""Bytes of a question that are read."""
_END = re.compile(rb"\r?\n\r?\n")
_ASKED = re.compile(rb"([A-Z]+) \S+ HTTP/1\.[0-9]\r?\n")
_SAID = {200: "OK", 400: "Bad Request", 501: "Not Implemented", 503: "Service Unavailable"}

Answer = Callable[[], tuple[int, dict[str, object]]]
"""Status and facts about the agent."""


def page(said: bytes, answer: Answer) -> bytes | None:
    """What to send to a client that *said* this so far; None while that is no whole question."""
    if _END.search(said) is None:
        return None if len(said) < LONGEST else _page(400, {"error": f"a question has at most {LONGEST} bytes"})
    asked = _ASKED.match(said)
    if asked is None:
        return _page(400, {"error": "this is no question in HTTP/1"})
    if asked[1] not in (b"GET", b"HEAD"):
        return _page(501, {"error": "ask with GET or HEAD"})
    return _page(*answer(), body=asked[1] == b"GET")


def _page(status: int, facts: Mapping[str, Any], *, body: bool = True) -> bytes:
    content = json.dumps(facts).encode()
    head = (
        f"HTTP/1.0 {status} {_SAID[status]}\r\nServer: elasticlib\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (content if body else b"")
