"""
Jobs that meet in a store of torch: a TCPStore that one of the nodes hosts, or a FileStore on one
machine.

Rules of this file: torch is only imported where it is needed. A TCPStore looks names up and waits
without limit. So it gets numeric addresses, a socket that we bound, and a thread that may be left
behind.
"""

from __future__ import annotations

import os
import resource
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from attrs import define, field
from typing_extensions import Self

from elasticlib._clock import monotonic
from elasticlib.errors import ConfigError, RendezvousClosedError, RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._binding import (
    ANYWHERE,
    Elsewhere,
    Taken,
    bind_endpoint,
    is_here,
    listen,
    loopback,
    outward_address,
)
from elasticlib.rendezvous.net._dial import Limited, probe
from elasticlib.rendezvous.net._endpoint import is_loopback, parse_rendezvous_endpoint, spell
from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS, Address, resolve
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, Exchange
from elasticlib.rendezvous.protocol._reading import greeting_of
from elasticlib.rendezvous.stores._file_store import PolledFileStore, is_stale, sign
from elasticlib.rendezvous.stores._shared_store import Claim, OtherJobs, forget, wait_for_jobs
from elasticlib.rendezvous.stores._torch_store import (
    CLAIMANT,
    SERVER,
    SERVES,
    Store,
    StoreExchange,
)
from elasticlib.spec import DEFAULT_PORT

LOOK_UP = 10.0
"""Seconds for the lookup of the host's name, before it is decided which node hosts the store."""
START = 20.0
"""Seconds for the start of a store; it takes a thousandth of the limit unless it looks names up."""
CLONE = 10.0
"""Seconds for one more connection to a store that has just answered."""
ANNOUNCED = 3.0
"""
Seconds within which a hosting node has written which job it serves, however busy it is.

A node that finds nothing then takes the store for one without a job, and coordinates its own there.
"""
DESCRIPTORS = 1 << 20
"""Enough descriptors for any use; the kernel's own limit may be a thousand times that."""
PREDECESSOR = 10.0
"""Seconds for which the store of a node that was killed may outlive it at most."""
GREETING = 2.0
"""Seconds to find out which node hosts the store in this node's place."""
_FORGETTING = 2.0
"""Seconds to reach the store once more, at the end."""
STORE_LIMIT = timedelta(seconds=1)
"""Time limit of a store for calls that have no limit argument."""


@define(eq=False)
class C10dBackend:
    """One node's access to the store of its job, which it may host."""

    job: NodeJob
    facts: Mapping[str, str] = field(factory=dict, kw_only=True)
    """Values by their full keys that a store of this process holds from its start."""
    host: str = field(init=False, default="localhost")
    port: int = field(init=False, default=0)
    _file: _StoreFile | None = field(init=False, default=None)
    """The file of the FileStore; None with a TCPStore."""
    _identity: str = field(init=False, factory=lambda: secrets.token_hex(8))
    server: Any = field(init=False, default=None)
    """
    The TCPStore that this process hosts, for as long as the process lives; None if it hosts none.
    """
    listening: socket.socket | None = field(init=False, default=None)
    """The endpoint's socket, besides the server's own: it stays open when the server's process dies."""
    _inner: Address | None = field(init=False, default=None)
    """Address of this process's own server, for itself."""
    _local: str | None = field(init=False, default=None)
    _connections: _TcpConnections = field(init=False)
    _claim: Claim = field(init=False)
    _role: _HostRole = field(init=False)

    def __attrs_post_init__(self) -> None:
        job = self.job
        self._role = _HostRole.of(job)
        self._claim = _claim_of(job)
        self._connections = _TcpConnections(job.run_id)
        match job.store_type:
            case "file":
                self._file = _StoreFile.of(job)
            case "tcp":
                self.host, self.port = parse_rendezvous_endpoint(job.endpoint, DEFAULT_PORT)
            case other:
                raise ConfigError(f"store_type={other!r} is unknown: give 'tcp' or 'file'")

    @property
    def endpoint(self) -> str:
        """Return the store's place, with the true port once it is bound."""
        if self._file is not None:
            return self._file.path or ""
        return spell(self.host, self.port)

    def prepare(self) -> None:
        """Import torch, however long a cold disk takes for that: no store may be judged by it."""
        # A node that has bound the endpoint looks like a store that does not answer: torch comes before that.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: F401

    def serve(self, deadline: float) -> bool:
        """
        Become the store's host if this machine is it; return whether this process hosts it now.

        Raises `RendezvousConnectionError` if a later try may succeed (the name is not known yet,
        the port is taken), `ConfigError` if none can. *deadline* is monotonic.
        """
        if self.server is not None:
            return True
        if self._file is not None or self._role.must_host is False:
            return False

        self.prepare()
        addresses = resolve(self.host, self.port, min(LOOK_UP, deadline - monotonic()))

        # The launcher kept the socket open when the process of this node that hosted the store ended.
        if self.listening is not None:
            self._start(self.listening.dup(), addresses)
            return True

        bound = bind_endpoint(self.host, self.port, addresses, alone=self.job.max_nodes == 1)
        if isinstance(bound, socket.socket):
            self._start(bound, addresses)
            return True

        # Another machine, or another node of this one, hosts the store: dial it.
        if not self._role.must_host:
            return False

        if isinstance(bound, Elsewhere):
            # The endpoint may still lead here: a forwarded port, a service's address.
            self._serve_behind(bound, addresses, deadline)
            return True

        raise self._taken(bound, addresses)

    def dial(self, timeout: float) -> Exchange:
        """
        Try to reach the store once, for about *timeout* seconds; raises `RendezvousConnectionError`
        with the reason.
        """
        self.prepare()
        if self._file is None:
            with _naming_first_host(self.job, has_met=self._local is not None):
                return self._dial_store(timeout)
        # Its nodes are processes of one machine.
        self._local = loopback()
        return self._file.open()

    def _dial_store(self, timeout: float) -> StoreExchange:
        deadline = monotonic() + timeout
        if self.port == 0:
            raise ConfigError.of_setting(
                "rdzv_endpoint", f"{self.job.endpoint!r} has port 0, so no other node can find the store: give a port"
            )
        addresses = resolve(self.host, self.port, timeout) if self._inner is None else [self._inner]
        return self._talk(addresses, deadline - monotonic())

    def address(self) -> str | None:
        """Return this machine's address for its peers, after a dial; None if unknown."""
        if not self._local or self._file is not None:
            return self._local
        if is_loopback(self._local) and not is_loopback(self.host):
            # The host's own way to its store is shorter than that of its peers.
            return outward_address()
        return self._local

    def served_run(self, exchange: Exchange) -> str | None:
        """
        Return the run id of the job whose node hosts the store; None for a store that no job
        serves.
        """
        return exchange.served_run if isinstance(exchange, StoreExchange) else None

    def word_of(self, exchange: Exchange) -> bytes | None:
        """Return the unique identity of the process that hosts the store; None if it has none."""
        if self._file is not None or not isinstance(exchange, StoreExchange):
            return None
        return exchange.root(SERVER, ANNOUNCED)

    def claim(self, exchange: Exchange) -> bool:
        """
        Return whether this node must coordinate its job on a store that serves another job, or
        none.

        The first node that asks must; so must the next one when that node was silent for two
        heartbeats. Raises `RendezvousConnectionError` until that is known, `RendezvousClosedError`
        for a file in which a job has ended.
        """
        assert isinstance(exchange, StoreExchange)
        if self._file is not None:
            return self._file.claim(exchange, self._claim.identity)
        return self._claim.take(exchange) or self._claim.take_over(exchange)

    def coordinating(self, exchange: Exchange) -> Exchange:
        """
        Return a new connection for the coordinator of a job that this node has claimed, or hosts
        the store of.
        """
        assert isinstance(exchange, StoreExchange)
        return self._claim.coordinating(exchange, hosts=self.server is not None)

    def forget_job(self) -> None:
        """
        Free the job's id for the next one, in a store that outlives it: this job is over for all.
        """
        if self._file is not None:
            self._file.remove()
        elif self.server is None:
            with suppress(RendezvousConnectionError):
                self._claim.give_up(self._dial_store(_FORGETTING))

    def stay(self, limit: float, report: Callable[[list[str]], None], gone: threading.Event) -> None:
        """
        Wait until all other jobs in the store that this process hosts have ended, at most *limit*
        seconds.

        *report* gets their names before the wait, if there is any; *gone* ends it. This job is over:
        its id is free.
        """
        if self.server is None:
            return

        def settle(living: list[str]) -> None:
            # A later node with the same job id must not wait for this job's coordinator.
            self.server.set(SERVES, "")
            forget(exchange)
            report(living)

        with suppress(RendezvousConnectionError):
            exchange = self._dial_store(_FORGETTING)
            wait_for_jobs(OtherJobs(exchange.clone()), limit, settle, gone)

    def close(self) -> None:
        """End the server, if there is one; may be called twice."""
        # torch ends a server with its object.
        self.server = self._inner = None
        if self.listening is not None:
            self.listening.close()
            self.listening = None
        if self._file is not None and self._file.is_temporary:
            self._file.remove()

    def _taken(self, bound: Taken, addresses: list[Address]) -> RendezvousConnectionError | ConfigError:
        now = monotonic()
        return self._role.taken(bound, self._present_host(addresses), now)

    def _present_host(self, addresses: list[Address]) -> str | None:
        """Return the node that hosts this very job at the endpoint; None if unknown."""
        with suppress(RendezvousConnectionError, RendezvousStateError):
            with closing(self._talk(addresses, GREETING)) as exchange:
                [data] = exchange.read([ANNOUNCEMENT])
            announcement = greeting_of(data, self.job.run_id, self._claim.key)
            if announcement is not None:
                return announcement.host
        return None

    def _serve_behind(self, elsewhere: Elsewhere, addresses: list[Address], deadline: float) -> None:
        """Host the store behind an endpoint that is elsewhere, if connections to it arrive here."""
        bound = listen(ANYWHERE, self.port)
        if isinstance(bound, Taken):
            raise self._taken(bound, addresses)
        if isinstance(bound, Elsewhere) or self.port == 0:
            raise self._role.refusal(f", but {elsewhere.why}")

        self._start(bound, [])
        with suppress(RendezvousConnectionError):
            with closing(self._talk(addresses, min(3.0, deadline - monotonic()))) as exchange:
                word = exchange.root(SERVER, 1.0)
            # Our own identity came back through the endpoint: its connections arrive here.
            if word == self._identity.encode():
                return

        self.close()
        raise self._role.refusal(
            f", but {elsewhere.why}, and connections to it do not arrive here: "
            f"give {self._role.reason} only to the node at {spell(self.host, self.port)}, or correct the endpoint"
        )

    def _start(self, listener: socket.socket, addresses: list[Address]) -> None:
        _raise_descriptor_limit()
        self.listening = self.listening or listener.dup()
        self.port = listener.getsockname()[1]
        inner = _way_to(listener, addresses)
        # A node that finds the served job has found all others.
        facts = {**self.facts, SERVER: self._identity, SERVES: self.job.run_id}
        start = partial(_start_server, inner.host, self.port, listener, facts)
        why = f"a name server of this machine does not answer: set RES_OPTIONS={QUIET_LOOKUPS} to wait less for it"
        silence = f"the store at {self.endpoint} did not start in {START:.0f} s: {why}"
        self.server = Limited[Any]().run(start, START, silence)
        self._inner = inner

    def _talk(self, addresses: list[Address], timeout: float) -> StoreExchange:
        deadline = monotonic() + timeout
        address, local = probe(self.host, self.port, addresses, timeout)
        limit = max(deadline - monotonic(), 0.1)
        exchange = self._connections.open(address.host, self.port, spell(self.host, self.port), limit)
        self._local = local
        return exchange


@contextmanager
def _naming_first_host(job: NodeJob, *, has_met: bool) -> Iterator[None]:
    """Add to an error before the first contact at which machine an engine's *job* meets."""
    try:
        yield
    except RendezvousConnectionError as error:
        if has_met or not job.hosts:
            raise
        raise type(error)(f"{error}: start the command on {job.hosts[0]} too, or give --engine none") from error


@define(eq=False)
class _TcpConnections:
    """
    Connections of job *run_id* to TCPStores.

    torch may never return from a port that accepts connections but is not a store. So each attempt
    has a thread; a bounded number of them may hang at an address.
    """

    run_id: str
    _attempts: dict[tuple[str, int], Limited[StoreExchange]] = field(init=False, factory=dict)

    def open(self, host: str, port: int, where: str, limit: float) -> StoreExchange:
        """
        Return a new connection to the store at the numeric address *host*, which errors call
        *where*; raise `RendezvousConnectionError` if it does not answer within *limit* seconds.
        """

        def clone() -> Store:
            silence = f"the store at {where} does not answer any more"
            return Limited[Store]().run(lambda: _client(host, port, where, CLONE), CLONE, silence)

        def talk() -> StoreExchange:
            exchange = StoreExchange(_client(host, port, where, limit), clone, self.run_id, where)
            announced = exchange.root(SERVES, ANNOUNCED)
            exchange.served_run = None if announced is None else announced.decode(errors="replace")
            return exchange

        why = "another program listens there, or the store's process is stopped"
        silence = f"{where} ({host}) answers, but is not a store: {why}"
        return self._attempts.setdefault((host, port), Limited()).run(talk, limit, silence)


@define(eq=False)
class _StoreFile:
    """The file in which the nodes of job *run_id* meet, all of them processes of one machine."""

    run_id: str
    path: str | None
    """None until `open` creates a temporary file."""
    is_temporary: bool = field(init=False, default=False)
    """True if this process created the file for itself alone."""

    @classmethod
    def of(cls, job: NodeJob) -> Self:
        """Return the file that the job's settings name; raise `ConfigError` for settings that have no meaning."""
        if not job.endpoint and job.max_nodes > 1:
            why = "store_type='file' needs the path of a file that all nodes see"
            raise ConfigError.of_setting("rdzv_endpoint", f"'' names no file: {why}")
        if job.is_host is not None:
            raise ConfigError(f"is_host={job.is_host} cannot be used with store_type='file': leave is_host out")
        return cls(job.run_id, job.endpoint or None)

    def open(self) -> StoreExchange:
        """Return a new connection to the store in the file."""
        if self.path is None:
            handle, self.path = tempfile.mkstemp(prefix="elasticlib_")
            os.close(handle)
            self.is_temporary = True

        path = self.path
        return StoreExchange(PolledFileStore.open(path), lambda: PolledFileStore.open(path), self.run_id, path)

    def claim(self, exchange: StoreExchange, identity: bytes) -> bool:
        """
        Claim the job for the process with this *identity*; return whether it is the first one.

        Raises `RendezvousClosedError` if the process that claimed it is gone.
        """
        claimant = exchange.replace(CLAIMANT, b"", identity)
        if claimant == identity:
            return True
        if is_stale(claimant):
            why = f"the process that coordinated the job in {self.path} is gone: remove that file, or name another one"
            raise RendezvousClosedError(why)
        return False

    def remove(self) -> None:
        """Delete the file, if it exists."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)


@define(eq=False)
class _HostRole:
    """
    The role of this node as host of *job*'s store, with the setting that decides it, for errors.
    """

    job: NodeJob
    must_host: bool | None
    """None: the node that can bind the endpoint hosts the store."""
    setting: str
    value: str
    _taken_since: float | None = None
    """Time at which this node, which must host the store, first found another one in its place."""

    @classmethod
    def of(cls, job: NodeJob) -> Self:
        """Return the role that the job's settings give."""
        if job.backend != "static":
            return cls(job, job.is_host, "is_host", "1")
        must_host = job.is_host
        if must_host is None:
            must_host = job.node_rank == 0
        return cls(job, must_host, "node_rank", "0")

    @property
    def reason(self) -> str:
        """Return the setting as the user wrote it."""
        return f"{self.setting}={self.value}"

    def refusal(self, complaint: str) -> ConfigError:
        """
        Return an error with *complaint* that names the setting by which this node must host the
        store.
        """
        return ConfigError.of_setting(self.setting, f"{self.value}{complaint}")

    def taken(self, bound: Taken, other: str | None, now: float) -> RendezvousConnectionError | ConfigError:
        """
        Return the error for a node that must host, and finds its place taken by node *other*, if
        known.

        The error is final once a predecessor of this node would be gone.
        """
        if self._taken_since is None:
            self._taken_since = now
        if other is None:
            why = f"another node of the job was given {self.reason} too, or another program uses the port"
            return RendezvousConnectionError(f"{self.reason}, but {bound.why}: {why}")

        why = f" was given twice: node {other} hosts job {self.job.run_id!r} there already, and "
        why += f"node {self.job.node} must host it too"

        # The other may be this very node's last process, which was killed and is still ending.
        if now >= self._taken_since + PREDECESSOR:
            return self.refusal(why)

        return RendezvousConnectionError(f"{self.reason}{why}")


def _claim_of(job: NodeJob) -> Claim:
    word = secrets.token_hex(16).encode()
    if job.store_type == "file":
        # The process's signature shows others whether it still runs.
        word = b" ".join([sign(), word])
    key = key_of(job.token) if job.token else None
    return Claim(job.run_id, job.heartbeat, word, key)


def _raise_descriptor_limit() -> None:
    """
    Raise the limit of descriptors as far as allowed: the server needs one for each node and worker.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(hard_limit, DESCRIPTORS)
    # Python's number for it is -1, which `min` takes for the lowest.
    if hard_limit == resource.RLIM_INFINITY:
        limit = DESCRIPTORS
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


def _way_to(listener: socket.socket, addresses: list[Address]) -> Address:
    """Return the address by which this process reaches its own server; *addresses* are the endpoint's."""
    here, port = listener.getsockname()[:2]
    # A listener on one address is reached through that address only.
    if here not in ("::", "0.0.0.0"):
        return Address(listener.family, here)
    for each in addresses:
        if not is_loopback(each.host) and is_here(each):
            return each
    return resolve(loopback(), port, LOOK_UP)[0]


def _start_server(host: str, port: int, listener: socket.socket, facts: dict[str, str]) -> Any:
    """Return a TCPStore that serves on *listener*, and contains the *facts*."""
    with listener:
        server = _server(host, port, listener)
    for key, value in facts.items():
        server.set(key, value)
    # Requests are served in order: this answer says that all facts are set.
    server.check(list(facts))
    return server


def _server(host: str, port: int, listener: socket.socket) -> Any:
    """Return a TCPStore that serves on *listener* and owns it from then on."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit, handle = timedelta(seconds=10), os.dup(listener.fileno())
    start = partial(TCPStore, host, port, None, True, limit, wait_for_workers=False, master_listen_fd=handle)
    try:
        try:
            return start(use_libuv=True)
        except RuntimeError as error:
            # Torch has no class of its own for a build without libuv.
            if "libuv" not in str(error):
                raise
            return start(use_libuv=False)
    except RuntimeError as error:
        raise RendezvousConnectionError(f"the store at {spell(host, port)} did not start: {error}") from error


def _client(host: str, port: int, where: str, limit: float) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The client tries twice within this time.
    once = timedelta(seconds=max(1.0, limit / 2))
    try:
        store = TCPStore(host, port, world_size=None, is_master=False, timeout=once, wait_for_workers=False)
    except RuntimeError as error:
        what = str(error).partition("\n")[0]
        raise RendezvousConnectionError(
            f"{where} ({host}) answers, but is not a store of torch.distributed: {what}"
        ) from error

    store.set_timeout(STORE_LIMIT)
    return cast(Store, store)
