"""
HTTP to one etcd server, with the standard library's client, which is enough for etcd's API.

Rules of this file: every call has a time limit. Every failure is a `RendezvousConnectionError` that
names the URL and the cause. A wait has a separate connection and can be ended from another thread.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from json import loads
from typing import Any

from attrs import Factory, define, frozen

from elasticlib._clock import monotonic
from elasticlib.errors import RendezvousConnectionError
from elasticlib.processes import wait_readable
from elasticlib.rendezvous.net._endpoint import spell

_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_GONE = (OSError, ValueError, http.client.HTTPException)
"""Exceptions of a connection that broke, or that another thread shut down."""


@frozen
class Site:
    """The address of a server."""

    host: str
    """The host as the user wrote it; a certificate must be for it."""
    port: int
    address: str
    """Numeric: names are looked up once, elsewhere and with a time limit."""
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        """The server's URL, for people."""
        return f"{'http' if self.tls is None else 'https'}://{spell(self.host, self.port)}"


@frozen
class HttpAnswer:
    """The server's answer to a request."""

    url: str
    status: int
    data: bytes

    def json(self) -> dict[str, Any]:
        """
        Return the body as a JSON object; raise an error for any other answer, which is not etcd's.
        """
        try:
            body = loads(self.data)
        except (ValueError, RecursionError):
            body = None

        if not isinstance(body, dict):
            text = self.data[:120].decode("utf-8", "replace").strip()
            raise RendezvousConnectionError(
                f"{self.url} answers, but is not etcd (status {self.status}, {text!r}): check host, port "
                "and protocol (http or https)"
            )

        return body


@define(eq=False)
class Line:
    """One thread's access to a server; calls share one connection."""

    site: Site
    limit: float
    """Default time limit of one call, in seconds."""
    _kept: http.client.HTTPConnection | None = None
    _lock: threading.Lock = Factory(threading.Lock)
    _waiting: socket.socket | None = None
    _closed: bool = False

    def call(self, method: str, path: str, body: str = "") -> HttpAnswer:
        """
        Send a request and return the answer, whatever its status; raises
        `RendezvousConnectionError`.
        """
        try:
            connection = self._connection()
            connection.sock.settimeout(self.limit)
            response = _send(connection, method, path, body)
            answer = HttpAnswer(self.site.url, response.status, response.read())
            # `http.client` would connect again itself, by name and without TLS.
            if response.will_close:
                self._drop()
            return answer
        except _GONE as error:
            self._drop()
            raise RendezvousConnectionError(_explain(self.site, error, self.limit)) from error

    def listen(self, path: str, body: str, timeout: float, is_news: Callable[[bytes], bool]) -> HttpAnswer | None:
        """
        Post *body*; return the first line of a long answer that *is_news*, or a refusal.

        Return None when none came within *timeout* seconds or the answer ended without. A call of
        `interrupt` ends it early.
        """
        if timeout <= 0:
            return None

        deadline = monotonic() + timeout
        try:
            connection = _open(self.site, self.limit)
        except _GONE as error:
            raise RendezvousConnectionError(_explain(self.site, error, self.limit)) from error

        sock = connection.sock
        try:
            with self._lock:
                # `interrupt` came before there was a socket to shut down.
                if self._closed:
                    return None
                self._waiting = sock

            sock.settimeout(timeout)
            with _send(connection, "POST", path, body) as response:
                while (left := deadline - monotonic()) > 0:
                    sock.settimeout(left)
                    line = response.readline() if response.status == http.client.OK else response.read()
                    if not line:
                        return None
                    if response.status != http.client.OK or is_news(line):
                        return HttpAnswer(self.site.url, response.status, line)

            return None
        except TimeoutError:
            return None
        except _GONE as error:
            # `interrupt` shut the socket down: the wait ended, without an error.
            if self._closed:
                return None
            raise RendezvousConnectionError(_explain(self.site, error, timeout)) from error
        finally:
            with self._lock:
                self._waiting = None
            connection.close()

    def clone(self) -> Line:
        """Return another line to the server."""
        return Line(self.site, self.limit)

    def interrupt(self) -> None:
        """End the present wait of another thread, and every later one, without blocking."""
        with self._lock:
            self._closed = True
            if self._waiting is not None:
                with contextlib.suppress(OSError):
                    # Not closed: that would leave the other thread in its read.
                    self._waiting.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connections up; may be called twice."""
        self.interrupt()
        self._drop()

    def __del__(self) -> None:
        self._drop()

    def _connection(self) -> http.client.HTTPConnection:
        if self._closed:
            raise ConnectionAbortedError("this connection was closed")
        if self._kept is not None and wait_readable([self._kept.sock], 0):
            # An idle connection that is readable was closed by the server.
            self._drop()
        if self._kept is None:
            self._kept = _open(self.site, self.limit)
        return self._kept

    def _drop(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()


def _open(site: Site, limit: float) -> http.client.HTTPConnection:
    sock = socket.create_connection((site.address, site.port), limit)
    try:
        # As `http.client` does with its own sockets: a small request must not wait for more.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if site.tls is not None:
            sock = site.tls.wrap_socket(sock, server_hostname=site.host)
    except BaseException:
        sock.close()
        raise

    connection = http.client.HTTPConnection(site.host, site.port)
    connection.sock = sock
    return connection


def _send(connection: http.client.HTTPConnection, method: str, path: str, body: str) -> http.client.HTTPResponse:
    content = {"Content-Type": "application/json"} if body else {}
    connection.request(method, path, body.encode(), content)
    return connection.getresponse()


def _explain(site: Site, error: Exception, limit: float) -> str:
    where = site.url
    if site.address != site.host:
        where = f"{site.url} (at {site.address})"
    text = str(error)

    # The order matters: each class before its base classes.
    match error:
        case ssl.SSLCertVerificationError():
            return f"{where} shows a certificate that is not trusted ({error.verify_message}): see ca_cert"
        case ssl.SSLError():
            return _explain_tls(where, error)
        case TimeoutError():
            why = "it is down or frozen, or packets are filtered on the way"
            return f"{where} did not answer within {limit:.3g} s: {why}"
        case ConnectionRefusedError():
            return f"{where} refused the connection: no etcd listens there"
        case OSError(errno=number) if number in _NO_ROUTE:
            return f"{where} cannot be reached: no route to it"
        case http.client.RemoteDisconnected() if site.tls is None:
            why = "closed without an answer; if TLS is spoken there, see protocol=https"
            return f"the connection to {where} broke: {why}"
        case http.client.RemoteDisconnected():
            pass
        case http.client.BadStatusLine():
            return f"{where} answers, but is not etcd ({text.strip()[:80]!r}): check host, port and protocol"

    return f"the connection to {where} broke: {text or type(error).__name__}"


def _explain_tls(where: str, error: ssl.SSLError) -> str:
    why = (error.reason or str(error)).lower().replace("_", " ")
    is_about_files = "alert" in why or "certificate" in why
    fix = "ssl_cert, ssl_cert_key and ca_cert" if is_about_files else "protocol=http, if it speaks no TLS"
    return f"{where} and this node do not agree on TLS ({why}): see {fix}"
