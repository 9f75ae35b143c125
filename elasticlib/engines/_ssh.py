"""
Machines over SSH: the system's ``ssh`` starts one agent on each host.

Rules of this file: an agent's standard input is its lease. The client writes a beat often; an agent that gets none for
`Ssh.timeout` seconds ends, as at the end of its input. So neither a client that dies nor a cut link leaves an agent
behind. One thread does all reading and writing, so that a slow console never delays a beat.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import shlex
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

from attrs import define, field

from elasticlib._clock import monotonic
from elasticlib._untrusted import lines
from elasticlib.engines._agent_frames import FrameReader, Kind, event_of, frame
from elasticlib.engines._hostfile import SshHost, check_hosts, parse_host, parse_hostfile
from elasticlib.engines._kept_agents import KeepsAgents
from elasticlib.engines._protocol import AgentCommand, AgentLost, EngineEvent
from elasticlib.errors import ConfigError, StartError
from elasticlib.processes import start_thread

_CONNECT_SECONDS = 2
_BEATS = 5
"""Number of beats within the time after which an agent ends without one."""
_CHUNK = 2**16
_MOST_OUTPUTS = 256
"""Number of unread events from which on no more output is read."""
_SSH_FAILED = 255
"""Exit status of ssh for errors of its own."""
_EXIT_SECONDS = 2.0
"""Seconds from the end of an ssh process's output to the end of the process."""
_MEANINGS = {
    "Could not resolve hostname": "no such host: check its name, or add it to ~/.ssh/config",
    "Connection refused": "no SSH server listens there: check the port",
    "No route to host": "the host is down or cannot be reached",
    "timed out": "the host is down or cannot be reached",
    "Permission denied": "log in with a key that needs no password: `ssh -o BatchMode=yes HOST true` must succeed",
    "Host key verification failed": "connect by hand once, to accept the host's key",
    "No module named": "install elasticlib there, or give the host's interpreter: Ssh(hosts, python=...)",
    "not found": "give the host's interpreter: Ssh(hosts, python=...)",
    "No such file": "give the host's interpreter: Ssh(hosts, python=...)",
}
"""Parts of messages of ssh, shells and Python, with their meaning or fix."""


class Ssh(KeepsAgents):
    """
    Hosts that ``ssh`` reaches without a password, with one node each, in this order.

    *hosts* is a list such as ``["h1", "user@h2:2222"]``, or the path of a host file of DeepSpeed or Open MPI, whose
    ``slots`` give the numbers of workers. *python* is the interpreter on the hosts (None: the path of this one).
    *env* has variables for the hosts, and *options* are arguments for ``ssh``, such as ``("-i", "key")``. After
    *timeout* seconds without contact a host counts as lost, and its workers stop.

    The hosts must reach each other; the first one hosts the rendezvous on a free port.

    ``with Ssh(["h1", "h2"]) as hosts:`` keeps the connections, with what is imported on the hosts, until the end of the
    block. It allows one call at a time.
    """

    endpoint = ""
    token = ""

    def __init__(
        self,
        hosts: Sequence[str] | str | os.PathLike[str],
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        timeout: float = 20.0,
    ) -> None:
        if not timeout >= 1:
            raise ConfigError.of_setting("timeout", f"{timeout!r} must be at least 1 second")
        if isinstance(options, str):
            raise ConfigError.of_setting("options", f"{options!r} must be a list of arguments, such as ('-i', 'key')")
        self.hosts = _hosts_of(hosts)
        self.python = python or sys.executable
        self.env = dict(env or {})
        self.options = tuple(options)
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"Ssh({[str(host) for host in self.hosts]})"

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return len(self.hosts)

    def start(self, agents: int, command: AgentCommand) -> SshPlacement:
        """Start *command* on the first *agents* hosts."""
        if shutil.which("ssh") is None:
            raise StartError("ssh is not installed on this machine: install OpenSSH's client")
        return SshPlacement(self, self.hosts[:agents], command)

    def line(self, host: SshHost, command: AgentCommand) -> list[str]:
        """Return the command line that starts an agent on *host*."""
        every = max(1, int(self.timeout / 4))
        # The first value of an option counts, so those of the user come first.
        settings = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}", f"ServerAliveInterval={every}"]
        port = ["-p", str(host.port)] if host.port else []
        options = [part for each in [*settings, "ServerAliveCountMax=3"] for part in ("-o", each)]
        return ["ssh", "-T", *self.options, *options, *port, "--", host.destination, self._remote(host, command)]

    def _remote(self, host: SshHost, command: AgentCommand) -> str:
        """Return the text that the shell on *host* runs."""
        variables = [f"{name}={value}" for name, value in {**command.environment, **self.env}.items()]
        slots = ["--workers", str(host.slots)] if host.slots else []
        lease = ["--lease", f"{self.timeout:g}"]
        return "exec " + shlex.join(["env", *variables, self.python, *command.argv, *lease, *slots])


def _hosts_of(hosts: Sequence[str] | str | os.PathLike[str]) -> tuple[SshHost, ...]:
    if isinstance(hosts, (str, os.PathLike)):
        path = os.fspath(hosts)
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError as error:
            raise ConfigError.of_setting(
                "hosts", f"{path!r} is not a readable host file ({error.strerror}): give its path, or a list of hosts"
            ) from None
        return check_hosts(parse_hostfile(text, path), f"the host file {path!r}")

    if not isinstance(hosts, Sequence) or not all(isinstance(host, str) for host in hosts):
        raise ConfigError.of_setting("hosts", f"{hosts!r} must be a list of names, such as ['h1', 'user@h2:2222']")
    return check_hosts([parse_host(host) for host in hosts], "the list")


@define(eq=False)
class _SshAgent:
    """One ssh process."""

    place: int
    number: int
    host: SshHost
    process: subprocess.Popen[bytes]
    unsent: bytearray
    reader: FrameReader = field(factory=lambda: FrameReader(greeted=True))
    messages: deque[str] = field(factory=lambda: deque(maxlen=20))
    """Last lines of its standard error: ssh's, and those of a shell or an interpreter that found no agent."""
    is_ending: bool = False
    """True if its standard input ends once all is sent."""
    is_open: bool = True

    def why(self) -> str:
        """Return how the agent ended, with the machine's name."""
        known = [line for line in self.messages if _meaning(line)]
        if known:
            # Programs of the host write there too, so a line that ssh is known for says most.
            return f"host {self.host}: {known[-1]} ({_meaning(known[-1])})"
        if self.messages:
            return f"host {self.host}: {' / '.join(self.messages)}"
        if self.process.returncode == _SSH_FAILED:
            return f"host {self.host}: ssh lost the connection"
        return f"host {self.host}: the agent ended with status {self.process.returncode}"


def _meaning(text: str) -> str:
    return next((meaning for part, meaning in _MEANINGS.items() if part in text), "")


class SshPlacement:
    """Agents on the hosts of one job."""

    def __init__(self, engine: Ssh, hosts: Sequence[SshHost], command: AgentCommand) -> None:
        self._engine, self._hosts, self._command = engine, hosts, command
        self._events: queue.SimpleQueue[EngineEvent | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._agents: list[_SshAgent] = []
        self._is_closed = False
        try:
            for place in range(len(hosts)):
                self._agents.append(self._started(place, 0))
            self._thread = start_thread(threading.Thread(target=self._run, name="elasticlib-ssh", daemon=True))
        except BaseException:
            self._kill_all()
            raise

    # Calls of the client.

    def next_event(self, timeout: float) -> EngineEvent | None:
        """Return the next event; None after *timeout* seconds without one."""
        try:
            event = self._events.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None
        # The thread has stopped reading output at that number of events: now there is room again.
        if self._events.qsize() == _MOST_OUTPUTS - 1:
            self._notify()
        return event

    def send(self, place: int, data: bytes) -> None:
        """Write *data* to the agent at *place*."""
        with self._lock:
            self._agents[place].unsent += data
        self._notify()

    def replace(self, place: int) -> None:
        """Start another agent at *place*."""
        with self._lock:
            former = self._agents[place]
            if former.is_open:
                former.process.kill()
                self._end(former)
            try:
                self._agents[place] = self._started(place, former.number + 1)
            except StartError as error:
                self._events.put(AgentLost(place, str(error), former.number + 1))
        self._notify()

    def stop(self) -> None:
        """End the standard input of all agents, once all before is sent."""
        with self._lock:
            for agent in self._agents:
                agent.is_ending = True
        self._notify()

    def close(self) -> None:
        """End all ssh processes."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._kill_all()
            self._events.put(None)
            self._selector.close()
            os.close(self._wake)

    def _notify(self) -> None:
        if not self._is_closed:
            os.eventfd_write(self._wake, 1)

    # Processes.

    def _started(self, place: int, number: int) -> _SshAgent:
        host = self._hosts[place]
        pipe = subprocess.PIPE
        line = self._engine.line(host, self._command)
        try:
            # A session of its own: Ctrl-C must reach this program alone, which stops the agents.
            process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise StartError(f"host {host}: cannot start ssh: {error.strerror}") from error

        agent = _SshAgent(place, number, host, process, bytearray(self._command.payload))
        # One thread serves all agents: none of them may block it.
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._watch(agent, process.stdout, selectors.EVENT_READ)
        self._watch(agent, process.stderr, selectors.EVENT_READ)
        self._watch(agent, process.stdin, selectors.EVENT_WRITE)
        return agent

    def _watch(self, agent: _SshAgent, stream: IO[bytes] | None, events: int) -> None:
        assert stream is not None
        self._selector.register(stream, events, agent)

    def _close_stream(self, stream: IO[bytes] | None) -> None:
        if stream is not None and not stream.closed:
            # A stream with nothing to write, or that is not read now, is not registered.
            with contextlib.suppress(KeyError):
                self._selector.unregister(stream)
            with contextlib.suppress(OSError):
                stream.close()

    def _end(self, agent: _SshAgent) -> None:
        """End the ssh process of *agent*, and report that."""
        if not agent.is_open:
            return
        agent.is_open = False
        self._close_stream(agent.process.stdin)
        try:
            agent.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            agent.process.kill()
            agent.process.wait()
        # The last messages, which often say why it ended, may be unread.
        if agent.process.stderr is not None and not agent.process.stderr.closed:
            self._read_messages(agent)
        self._close_stream(agent.process.stdout)
        self._close_stream(agent.process.stderr)
        self._events.put(AgentLost(agent.place, agent.why(), agent.number))

    def _kill_all(self) -> None:
        for agent in self._agents:
            if agent.is_open:
                agent.process.kill()
                self._end(agent)

    # The thread.

    def _run(self) -> None:
        try:
            self._serve_all()
        # Without this thread no agent gets a beat, and each of them ends.
        except Exception as error:
            for agent in self._agents:
                self._events.put(AgentLost(agent.place, f"host {agent.host}: {error!r}", agent.number))

    def _serve_all(self) -> None:
        every = self._engine.timeout / _BEATS
        next_beat = monotonic()
        while not self._is_closed:
            now = monotonic()
            if now >= next_beat:
                next_beat = now + every
                self._beat()
            self._turn(next_beat - now)

    def _beat(self) -> None:
        with self._lock:
            for agent in self._agents:
                # A link that takes nothing must not fill the memory.
                if agent.is_open and not agent.is_ending and not agent.unsent:
                    agent.unsent += frame(Kind.BEAT)

    def _turn(self, timeout: float) -> None:
        """Wait for a stream that is ready, and read or write it."""
        self._choose_streams()
        for key, _ in self._selector.select(max(0.0, timeout)):
            if key.fileobj == self._wake:
                os.eventfd_read(self._wake)
                continue
            with self._lock:
                # An event before this one may have ended the agent.
                if key.data.is_open:
                    self._serve(key.data, key.fileobj)

    def _choose_streams(self) -> None:
        """Watch for room only where something is unsent, and for output only while others read it."""
        with self._lock:
            reads = self._events.qsize() < _MOST_OUTPUTS
            for agent in self._agents:
                if not agent.is_open:
                    continue
                if agent.is_ending and not agent.unsent:
                    self._close_stream(agent.process.stdin)
                self._set_watched(agent, agent.process.stdin, selectors.EVENT_WRITE, bool(agent.unsent))
                self._set_watched(agent, agent.process.stdout, selectors.EVENT_READ, reads)

    def _set_watched(self, agent: _SshAgent, stream: IO[bytes] | None, events: int, is_watched: bool) -> None:
        if stream is None or stream.closed:
            return
        is_known = stream in self._selector.get_map()
        if is_watched and not is_known:
            self._selector.register(stream, events, agent)
        elif is_known and not is_watched:
            self._selector.unregister(stream)

    def _serve(self, agent: _SshAgent, stream: object) -> None:
        if stream is agent.process.stdin:
            self._write(agent)
        elif stream is agent.process.stderr:
            self._read_messages(agent)
        else:
            self._read(agent)

    def _write(self, agent: _SshAgent) -> None:
        assert agent.process.stdin is not None
        try:
            sent = os.write(agent.process.stdin.fileno(), memoryview(agent.unsent)[:_CHUNK])
        except BlockingIOError:
            return
        except OSError:
            # The process has ended, or will: its output says why.
            agent.unsent.clear()
            self._close_stream(agent.process.stdin)
            return
        del agent.unsent[:sent]

    def _read_messages(self, agent: _SshAgent) -> None:
        assert agent.process.stderr is not None
        data = _read_some(agent.process.stderr)
        if data == b"":
            self._close_stream(agent.process.stderr)
        text = (data or b"").decode(errors="replace")
        agent.messages.extend(lines(line).strip()[:300] for line in text.splitlines() if line.strip())

    def _read(self, agent: _SshAgent) -> None:
        assert agent.process.stdout is not None
        data = _read_some(agent.process.stdout)
        if data is None:
            return
        # Its output ends with the agent; the messages in the other pipe are read by `_end`.
        if data == b"":
            self._end(agent)
            return
        try:
            for kind, content in agent.reader.feed(data):
                self._events.put(event_of(agent.place, agent.number, kind, content))
        except ValueError as error:
            agent.messages.append(f"its output cannot be read: {error}")
            agent.process.kill()
            self._end(agent)


def _read_some(stream: IO[bytes]) -> bytes | None:
    """Return some bytes, b"" at the end; None if it has no bytes now."""
    try:
        return os.read(stream.fileno(), _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
