"""
What the health check answers with: one page, made with Python's own HTTP server.

Rules of this file: it is imported when a health check starts, and not before: most launches have none, and Python's
server is slow to import.
"""

from __future__ import annotations

import http.server
import json
from collections.abc import Callable
from typing import Any

REQUEST_LIMIT = 5.0
"""Seconds that a client may take for its question."""


class Server(http.server.ThreadingHTTPServer):
    """Answers connections, each in a thread; it does not listen itself."""

    daemon_threads = True

    def __init__(self, answer: Callable[[], tuple[int, dict[str, object]]]) -> None:
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()  # of no use, with this listening elsewhere
        self.answer = answer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that goes away in the middle is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_LIMIT
    server: Server
    server_version = "elasticlib"
    sys_version = ""

    def do_GET(self) -> None:
        """Say whether the agent is alive."""
        self._send(body=True)

    def do_HEAD(self) -> None:
        """Say so without a body."""
        self._send(body=False)

    def _send(self, *, body: bool) -> None:
        status, facts = self.server.answer()
        content = json.dumps(facts).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes come every few seconds."""
