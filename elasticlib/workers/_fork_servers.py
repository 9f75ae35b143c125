"""
The launcher's handles of its fork servers: started if none fits, and kept warm for the next
launch.

Rules of this file: every process that is started here ends with the launcher (`_reaper`). A child
that the caller forks drops all handles, so that it can neither use the fork servers nor keep them
alive.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from json import dumps

from elasticlib import processes, records
from elasticlib._clock import monotonic
from elasticlib.errors import PreloadError, StartError
from elasticlib.helpers import Helper, Reported, first_child, fork_server_lost, reaper_lost
from elasticlib.preload import ForkServerKey, Reads, serves, stamps
from elasticlib.processes import (
    AT_START_CODE,
    BOOT_CODE,
    KILL_SECONDS,
    REAPER_PATH,
    Caller,
    Channel,
    HelperLostError,
    Link,
    Message,
    Process,
    current_folder_can_be_entered,
    identity_of_current_folder,
    spawn,
    wait_readable,
)
from elasticlib.stacks import crash_frames
from elasticlib.workers.child import _report

_log = logging.getLogger("elasticlib")
_FORK_SERVER_BOOT = (
    BOOT_CODE + AT_START_CODE + "from elasticlib.workers.spawner._fork_server import main; main(at_start)"
)

_MOST_IDLE = 2
_TALK_LIMIT = 5.0
"""Seconds in which a fork server must read a message, or complete one that it sends."""
_SLOW_IMPORT = 10.0
"""Seconds after which an import of a fork server is reported as slow."""
_CLOSE_LIMIT = 0.5
"""
Seconds that a launch waits for the end of a fork server that it displaced; after that a thread
waits.
"""


class _Imports:
    """The imports of a fork server: at most one is in progress, with a file for its stack."""

    def __init__(self) -> None:
        self._present: tuple[str, float, int] | None = None
        """The module, the start time, and the file in which the stack is after a while."""
        self._reported: set[str] = set()

    def begin(self, module: str, *stack: int) -> None:
        """Note the import of *module*; without a free descriptor there is no file for its *stack*."""
        self.end()
        if stack:
            self._present = module, monotonic(), stack[0]

    def end(self) -> None:
        """Note that no import is in progress."""
        if self._present is not None:
            os.close(self._present[2])
            self._present = None

    def slow(self) -> records.ImportTakesLong | None:
        """Return a record of the present import, once, if it takes long."""
        if self._present is None:
            return None
        module, since, stack = self._present
        if monotonic() < since + _SLOW_IMPORT or module in self._reported:
            return None
        self._reported.add(module)
        return records.ImportTakesLong(module, _SLOW_IMPORT, _innermost_place(_report.read_text(stack)))


class StartConditions:
    """
    The conditions under which a fork server was started, and what its imports have read: a launch
    under other conditions needs another fork server.
    """

    def __init__(self, key: ForkServerKey, environment: Mapping[str, str], search_path: Sequence[str]) -> None:
        self._key = key
        self._caller = Caller.now()
        self._folder = identity_of_current_folder()
        self._environment = dict(environment)
        self._search_path = tuple(search_path)
        self._stamps = stamps(key, search_path, {})
        self._files: Mapping[str, int] = {}
        """
        Times of change of the imported files, as the fork server found them (ns, by path); empty
        before its imports are done.
        """
        self._reads: Reads | None = None

    def note_imports(self, message: Message) -> None:
        """Note the variables and files that the imports have read, by the fork server's *message*."""
        self._reads = Reads.of_message(message, self._key.preload)
        self._files = message.get("files", {})

    def allow(self, key: ForkServerKey, environment: Mapping[str, str], caller: Caller) -> bool:
        """Return True if a launch with *key* by *caller*, whose workers get the *environment*, can use it."""
        if not (self._caller.can_serve(caller) and self._key.covers(key)):
            return False
        if self._folder != identity_of_current_folder() and not current_folder_can_be_entered():
            # Its children could not enter the current folder of this program.
            return False
        return serves(self._reads, self._environment, environment)

    def have_changed(self) -> bool:
        """
        Return True if an imported file or an archive on the path changed, or a package was
        installed.
        """
        # Times at the start beat those after the imports: a file may have changed in between.
        return {**self._files, **self._stamps} != stamps(self._key, self._search_path, self._files)


class ForkServer:
    """A running fork server with its reaper, and the link that carries requests to fork."""

    def __init__(self, key: ForkServerKey, environment: Mapping[str, str], search_path: Sequence[str]) -> None:
        self.key = key
        self._conditions = StartConditions(key, environment, search_path)
        self.spawners = 0
        """Number of launches that use it."""
        self._imports = _Imports()
        self._lock = threading.Lock()
        """
        Held to receive from the fork server, or to close it: for at most `_TALK_LIMIT` seconds.
        """
        self._sending = threading.Lock()
        self._failure: Exception | None = None
        self._stderr = processes.anonymous_file("fork server-stderr")
        ours, theirs = Channel.pair()
        ours.limit(_TALK_LIMIT)
        self._link = Link(ours)
        order = dumps({"preload": key.preload, "path": list(search_path)})
        # Without site packages, which the reaper does not import: it must start in milliseconds.
        reaper = [sys.executable, "-S", "-E", REAPER_PATH, str(os.getpid())]
        self._process: Process | None = None
        """The fork server itself, once its imports are done."""
        self._reaper = spawn(
            [*reaper, key.python, *key.flags, "-u", "-c", _FORK_SERVER_BOOT, order],
            environment,
            theirs.fileno(),
            self._stderr,
        )
        theirs.close()
        self._guard = Helper("reaper", self._reaper)
        self._itself = self._guard
        """The fork server, once this program knows its process id."""

    def serves(self, key: ForkServerKey, environment: Mapping[str, str], caller: Caller) -> bool:
        """
        Return True if a launch with *key* by *caller* can fork its workers from this fork server.

        The workers get the *environment*.
        """
        self.listen()
        return self._conditions.allow(key, environment, caller)

    def alive(self) -> bool:
        """Return True if it can still fork, as far as this process knows."""
        return self.listen() is None

    def ready(self) -> bool:
        """Return True if its imports are done."""
        self.listen()
        return self._process is not None

    def outdated(self) -> bool:
        """Return True if its imports may have changed, so that new workers need another one."""
        return self._conditions.have_changed()

    def is_out_of_reach(self) -> bool:
        """
        Return True if this program has dropped the privileges with which it started the fork
        server.
        """
        return not self._reaper.may_be_signalled()

    def request(self, op: str) -> Channel:
        """Request a child for *op* from the fork server, and return the channel to it."""
        ours, theirs = Channel.pair()
        try:
            self._send({"op": op}, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Link(ours)

    def _send(self, message: Message, *descriptors: int) -> None:
        self._wake()
        try:
            with self._sending:
                self._link.send(message, descriptors)
        except BlockingIOError as error:
            self._failure = StartError("the fork server process does not respond: it is suspended, or hangs")
            raise self._failure from error

    def listen(self) -> Exception | None:
        """Read the fork server's messages; return the error that ended it, None while it lives."""
        with self._lock:
            while self._failure is None and wait_readable([self._link], 0):
                try:
                    # It may be stopped within a message; this program must not wait for the rest.
                    received = self._link.receive(whole=False)
                except BlockingIOError:
                    self._failure = StartError("the fork server process stopped in the middle of a message")
                    break

                if received is None:
                    self._failure = fork_server_lost(self._reaper, self._process, self._words())
                elif received[0]["op"] == "refused":
                    self._failure = PreloadError(received[0]["module"], received[0]["why"])
                elif received[0]["op"] == "importing":
                    self._imports.begin(received[0]["module"], *received[1])
                elif received[0]["op"] == "pong":
                    self._itself.answered = received[0]["number"]
                else:
                    self._imports.end()
                    self._conditions.note_imports(received[0])
                    self._process = Process.sent(received[0]["pid"], received[1])
                    self._itself = Helper("fork server", self._process, self._ping)
                    self._say_left_out(received[0].get("left_out", ()))
                    if warnings := self._words():
                        print(warnings, file=sys.stderr)

            return self._failure

    def _say_left_out(self, modules: Sequence[str]) -> None:
        """
        Log that workers import *modules* themselves, and why.

        It is a warning if the user asked for a preload.
        """
        if modules:
            _log.log(
                logging.INFO if self.key.is_automatic else logging.WARNING,
                "preload=%r is ignored: a start hook of this interpreter, sitecustomize or a .pth file, "
                "starts a thread or opens a socket, which a fork would lose; each worker is a new "
                "interpreter",
                ",".join(modules),
            )

    def slow_import(self) -> records.ImportTakesLong | None:
        """
        Return a record of the current import, if it takes long and was not reported yet; else
        None.
        """
        self.listen()
        return self._imports.slow()

    def helpers(self, is_awaited: bool) -> list[Helper]:
        """
        Return the processes of this fork server; *is_awaited*: the launch waits for its answer.
        """
        self.listen()
        if self._process is None and self._itself is self._guard and (pid := first_child(self._reaper.pid)):
            # At its imports: this program holds no handle of it, and the reaper forwards this
            # signal.
            self._itself = Helper("fork server", Reported(pid, lambda signum: self._reaper.send(signum)))
        self._itself.is_needed = self._guard.is_needed = is_awaited
        return [self._guard] if self._itself is self._guard else [self._guard, self._itself]

    def _ping(self, number: int) -> None:
        self._send({"op": "ping", "number": number})

    def signal_child(self, pid: int, signum: int) -> None:
        """
        Make the fork server send *signum* to its child *pid*, if that lives: this program holds
        no handle of it.
        """
        # A launch notices the error elsewhere.
        with contextlib.suppress(StartError):
            self._send({"op": "signal", "pid": pid, "signal": signum})

    def replace(self, why: str) -> None:
        """Kill it because it stands still; *why* is the reason."""
        with self._lock:
            self._failure = self._failure or HelperLostError(why)
        self._reaper.send(signal.SIGKILL)

    def _words(self) -> str:
        return _report.read_text(self._stderr).strip()

    def failure(self, child: str, pid: int = 0) -> Exception:
        """
        Return the reason for the end of the channel to its *child*.

        It is an error of the fork server or reaper, or the child alone was killed.
        """
        # A child that has begun depends on the reaper alone.
        lost = reaper_lost(self._reaper) if pid else self.listen()
        return lost or HelperLostError.of(child, pid)

    def close(self, timeout: float | None = None) -> None:
        """
        End the fork server and its reaper, with everything below; return when they are gone.

        Processes that hang are killed in the end: by a thread, if that takes longer than
        *timeout* seconds.
        """
        self.listen()
        if self._process is None:
            # At its imports it reads no messages. It has forked nothing yet, and dies with its
            # reaper.
            self._reaper.send(signal.SIGKILL)
        else:
            with contextlib.suppress(StartError):
                # In order: if it were killed, processes that workers detached would die too.
                self._send({"op": "end"})

        self._wake()
        with self._lock:
            self._failure = self._failure or StartError("the fork server was closed")
            self._link.close()

        # A launch waits this long for one that it displaced; a thread waits for the rest.
        if timeout is None or self._reaper.ends(timeout):
            self._reap()
        else:
            try:
                threading.Thread(target=self._reap, name="elasticlib-end-of-template").start()
            except RuntimeError:  # no thread can be started, or the program is ending
                self._reap()

    def _reap(self) -> None:
        if self._process is not None:
            # It kills its descendants first; one that even SIGKILL does not end may take it that
            # long.
            if not self._process.ends(KILL_SECONDS + 1):
                # Its reaper ends the rest.
                self._process.kill(0.0)
            self._process.close()

        self._reaper.wait(KILL_SECONDS + 1)
        self._imports.end()
        os.close(self._stderr)

    def _wake(self) -> None:
        """Continue the processes: one that was stopped from outside reads no messages."""
        self._reaper.send(signal.SIGCONT)
        if self._process is not None:
            self._process.send(signal.SIGCONT)

    def drop(self) -> None:
        """Forget the fork server in a process that was forked from its owner."""
        self._failure = StartError("the fork server belongs to the process that forked this one")


def _innermost_place(stack: str) -> str:
    """
    Return file and line of the innermost frame of *stack* that is in a file; empty without one.
    """
    found = [frame for frame in crash_frames(stack) if not frame.file.startswith("<frozen ")]
    if not found:
        return ""
    return f"{found[-1].file}, line {found[-1].line}"


class _ForkServers:
    """
    The fork servers of this program, the most recently used last: those in use, and at most two
    idle ones.

    The lock is held for looking and for starting, never for an end: no launch waits for another
    one's fork server.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[ForkServer] = []

    def take(self, key: ForkServerKey, environment: Mapping[str, str], search_path: Sequence[str]) -> ForkServer:
        caller = Caller.now()
        with self._lock:
            done = [each for each in self._kept if each.spawners == 0 and self._is_useless(each)]
            self._kept = [each for each in self._kept if each not in done]
            found = self._fitting(key, environment, caller)
            if found is None:
                found = ForkServer(key, environment, search_path)
            else:
                self._kept.remove(found)

            found.spawners += 1

            # The most recently used one stands last.
            self._kept.append(found)

        # Outside of the lock: an end may take long, and other launches must not wait for it.
        _end(done)
        return found

    def _fitting(self, key: ForkServerKey, environment: Mapping[str, str], caller: Caller) -> ForkServer | None:
        """
        Return the latest fork server that serves the launch, preferably a ready one; called under
        the lock.
        """
        alive = [each for each in reversed(self._kept) if each.alive()]
        fitting = [each for each in alive if each.serves(key, environment, caller) and not each.outdated()]
        # A ready one saves the imports, so it beats one that was used later.
        for fork_server in fitting:
            if fork_server.ready():
                return fork_server
        return fitting[0] if fitting else None

    @staticmethod
    def _is_useless(fork_server: ForkServer) -> bool:
        # A program never regains dropped privileges, so no launch will need one out of reach.
        return not fork_server.alive() or fork_server.outdated() or fork_server.is_out_of_reach()

    @contextlib.contextmanager
    def warming(
        self, key: ForkServerKey | None, environment: Mapping[str, str], search_path: Sequence[str]
    ) -> Iterator[ForkServer | None]:
        """
        Start a fork server's imports for a launch in the block, before the launch starts its
        workers.
        """
        there = None
        if key is not None:
            # The launch meets the same error itself when it starts its workers.
            with contextlib.suppress(StartError):
                there = self.take(key, environment, search_path)

        try:
            yield there
        finally:
            if there is not None:
                self.give_back(there, unused=True)

    def give_back(self, fork_server: ForkServer, unused: bool = False) -> None:
        """
        Let *fork server* serve others; end it if it was never used and is still at its imports.
        """
        done = []
        with self._lock:
            fork_server.spawners -= 1
            is_idle = fork_server.spawners == 0 and fork_server in self._kept
            if is_idle and self._must_end(fork_server, unused):
                self._kept.remove(fork_server)
                done = [fork_server]
            done += self._surplus()
        _end(done)

    @staticmethod
    def _must_end(fork_server: ForkServer, unused: bool) -> bool:
        # A dead one was kept for its reaper, which guards its spawners.
        if not fork_server.alive():
            return True
        return unused and not fork_server.ready()

    def _surplus(self) -> list[ForkServer]:
        """Remove and return the surplus ones; called under the lock."""
        idle = [fork_server for fork_server in self._kept if fork_server.spawners == 0]
        surplus = idle[: max(0, len(idle) - _MOST_IDLE)]
        self._kept = [fork_server for fork_server in self._kept if fork_server not in surplus]
        return surplus

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
        for fork_server in kept:
            fork_server.close()

    def drop(self) -> None:
        self._lock = threading.Lock()
        kept, self._kept = self._kept, []
        for fork_server in kept:
            fork_server.drop()


def _end(some: Sequence[ForkServer]) -> None:
    """End fork servers that no launch can find any more."""
    for fork_server in some:
        fork_server.close(_CLOSE_LIMIT)


fork_servers = _ForkServers()
atexit.register(fork_servers.close)
os.register_at_fork(after_in_child=fork_servers.drop)
