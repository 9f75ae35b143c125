"""
The etcd backend: any node may leave, including the coordinating one.

Rules of this file: connections are made here, and their errors are distinguished here. Values are
checked when the backend is made, before anything waits. No node hosts the store: the servers exist
before the job and after it.
"""

from __future__ import annotations

import os
import ssl
from typing import Any

from elasticlib._clock import monotonic
from elasticlib.errors import ConfigError, RendezvousConnectionError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous._rdzv_options import ETCD_PREFIX
from elasticlib.rendezvous.net._binding import address_towards
from elasticlib.rendezvous.net._endpoint import parse_rendezvous_endpoint
from elasticlib.rendezvous.net._resolver import resolve
from elasticlib.rendezvous.stores._election import KeysBackend
from elasticlib.rendezvous.stores._keys import component
from elasticlib.rendezvous.stores.etcd._http import Line, Site
from elasticlib.rendezvous.stores.etcd._v3 import Keeper, V3Keys

DEFAULT_PORT = 2379
NAMES = ("etcd", "etcd-v2", "etcd-v3")
_TLS_FILES = {"ssl_cert": "cert", "ssl_cert_key": "key", "ca_cert": "cacert"}
"""Options that name files, with their other names."""


class EtcdBackend(KeysBackend):
    """
    Makes connections for one job through etcd's v3 API, for each of `NAMES`.

    The endpoint may name several servers, with commas: any one will do.
    """

    def __init__(self, job: NodeJob) -> None:
        if job.backend not in NAMES:
            raise ConfigError.of_setting("rdzv_backend", f"{job.backend!r} is unknown: give one of {', '.join(NAMES)}")

        endpoints = (parse_rendezvous_endpoint(part, DEFAULT_PORT) for part in job.endpoint.split(","))
        self._endpoints = list(dict.fromkeys(endpoints))
        if any(port == 0 for _, port in self._endpoints):
            raise ConfigError.of_setting(
                "rdzv_endpoint", f"{job.endpoint!r}: port 0 cannot be used; etcd's default port is {DEFAULT_PORT}"
            )

        self._tls = _tls(job.options)
        self.prefix = str(job.options.get("etcd_prefix", ETCD_PREFIX)).strip("/")
        # The prefix may be empty.
        root = f"/{self.prefix}/job_{component(job.run_id)}".replace("//", "/")
        super().__init__(job.backend, root, job.heartbeat)
        self._limit = float(job.options.get("read_timeout", 60.0))
        """
        Seconds that one call may take: a silent server must be noticed well before this node is
        thought lost.
        """
        if job.heartbeat:
            self._limit = min(self._limit, max(2.0, job.heartbeat / 2))
        self._keeper = Keeper()

    def connect(self, timeout: float) -> V3Keys:
        """Do the same as `dial`, for callers that need more than an exchange."""
        deadline, troubles = monotonic() + timeout, []

        def share(parts: int) -> float:
            return max((deadline - monotonic()) / parts, 0.1)

        endpoints = self._endpoints
        for number, (host, port) in enumerate(endpoints):
            try:
                addresses = resolve(host, port, share(len(endpoints) - number))
            except RendezvousConnectionError as error:
                troubles.append(str(error))
                continue

            for index, address in enumerate(addresses):
                # The addresses from this one on and the servers after this one share the time.
                limit = share(len(endpoints) - number + len(addresses) - index - 1)
                try:
                    keys = self._speak(Site(host, port, address.host, self._tls), limit)
                except RendezvousConnectionError as error:
                    troubles.append(str(error))
                    continue

                self._address = address_towards(address)

                # The next connection tries the server that answered first.
                self._endpoints = [(host, port), *endpoints[:number], *endpoints[number + 1 :]]
                return keys

        raise RendezvousConnectionError("etcd cannot be reached: " + "; ".join(dict.fromkeys(troubles)))

    def _speak(self, site: Site, limit: float) -> V3Keys:
        line = Line(site, limit)
        try:
            keys = self._keys(line)
            keys.keep(self._root)
            line.limit = self._limit
            return keys
        except BaseException:
            line.close()
            raise

    def _keys(self, line: Line) -> V3Keys:
        reply = line.call("GET", "/version").json()
        try:
            version = tuple(int(part) for part in reply["etcdserver"].split(".")[:2])
        except (KeyError, AttributeError, ValueError):
            why = f"{line.site.url} answers, but is not etcd: it says {str(reply)[:80]}"
            raise RendezvousConnectionError(why) from None

        if version < (3, 3):
            spoken = ".".join(map(str, version))
            raise ConfigError(
                f"the etcd server at {line.site.url} has version {spoken}: version 3.3 or later is needed"
            )

        # etcd 3.3 has the API under its older name alone.
        return V3Keys(line, "/v3" if version >= (3, 4) else "/v3beta", self._keeper)


def _tls(options: Any) -> ssl.SSLContext | None:
    """
    Return the TLS context of the connections, None without TLS; raise `ConfigError` for unusable
    files.
    """
    files = _tls_files(options)
    protocol = options.get("protocol", "http")
    if protocol not in ("http", "https"):
        raise ConfigError(f"protocol={protocol!r} must be http or https")
    if protocol == "https":
        return _context(*map(files.get, _TLS_FILES))
    if files:
        raise ConfigError(f"{next(iter(files))} is given, but protocol is http: add protocol=https")
    return None


def _tls_files(options: Any) -> dict[str, str]:
    files = {}
    for name, other in _TLS_FILES.items():
        path = options.get(name, options.get(other))
        if path is not None:
            files[name] = path
    for name, path in files.items():
        if not os.path.isfile(path):
            raise ConfigError(f"{name}={path!r} does not exist")
    return files


def _context(cert: str | None, key: str | None, ca: str | None) -> ssl.SSLContext:
    if key and not cert:
        raise ConfigError(f"ssl_cert_key={key!r} is given without ssl_cert")

    try:
        context = ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"ca_cert={ca!r} contains no certificate: {error}") from error

    if not cert:
        return context

    try:
        # Without a password's prompt: no user would answer it.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError) as error:
        why = f"ssl_cert={cert!r} and ssl_cert_key={key!r} are not a certificate and its key: {error}"
        raise ConfigError(why) from error

    return context
