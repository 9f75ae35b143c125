"""
The agent of one machine: ``python -m elasticlib.remote._node``, started by an engine.

It reads frames on its standard input: the call, the job's settings, then beats. It writes frames on its standard
output: its address, the workers' output, and the outcome of its node. With ``--stays`` it waits for another call then,
and its fork servers stay warm.

Rules of this file: the end of the input stops the workers and ends this program; so does an input without a beat for
``--lease`` seconds. A client that is out of reach must not hold the main thread: other threads write the frames.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from json import dumps
from typing import Any

from attrs import evolve, frozen

from elasticlib import records
from elasticlib._clock import monotonic, wall_time
from elasticlib._untrusted import parse, seconds
from elasticlib.engines import MAGIC, FrameReader, Kind, frame
from elasticlib.errors import SignalException
from elasticlib.job import Job
from elasticlib.launch import CheckedLaunch
from elasticlib.processes import start_thread, wait_readable
from elasticlib.remote._call import Call, JobSettings, pack_error, pack_results, settings_on_node, unpack_call
from elasticlib.remote._call_modules import CallModules
from elasticlib.remote._node_log import name_machine_in_log
from elasticlib.remote._node_reporter import NodeReporter, answer_later, last_output
from elasticlib.remote._node_reports import NodeReport, seconds_between_reports
from elasticlib.remote._whole_lines import WholeLines
from elasticlib.rendezvous import host_name
from elasticlib.spec import LaunchConfig
from elasticlib.workers import StopRequest

_CHUNK = 2**15
_STREAMS = (1, 2)
_OPEN_LINE_SECONDS = 0.2
"""Seconds for which a line is kept that has no end yet: another machine's line may be shown before its rest."""
_LAST_SECONDS = 2.0
"""Seconds for the last frame after a stop."""
_END_SECONDS = 10.0
"""Seconds from SIGKILL of the workers to the end of their job."""


def main() -> None:
    """Run the agent to its end, and end this process at once: a thread may still write to a client out of reach."""
    parser = argparse.ArgumentParser(prog="python -m elasticlib.remote._node")
    parser.add_argument("--lease", type=float, default=None)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--address", default="")
    parser.add_argument("--stays", action="store_true")
    options = parser.parse_args()

    name_machine_in_log()
    machine = _Machine(options.address or _address(), options.workers)
    _AgentProgram(_ClientLink(options.lease), machine, stays=options.stays).run()
    os._exit(0)


class _ClientLink:
    """The frames from and to the client, on descriptors that workers do not get."""

    def __init__(self, lease: float | None) -> None:
        self._lease = lease
        self._input, self._output = os.dup(0), os.dup(1)
        self._reader = FrameReader(greeted=False)
        self._unsent: queue.Queue[bytes] = queue.Queue(maxsize=64)
        """Bounded: a client that reads slowly slows the threads that read the workers' output."""
        self._sent_last = os.eventfd(0, os.EFD_CLOEXEC)
        """Readable once all is sent after `finish`."""
        self._last_message_at = monotonic()
        start_thread(threading.Thread(target=self._write, daemon=True))

    def send(self, data: bytes) -> None:
        """Send *data* after all before; waits while the client reads too slowly."""
        self._unsent.put(data)

    def drop(self) -> None:
        """Send nothing any more: nobody reads it, and workers whose output waits could not end."""
        start_thread(threading.Thread(target=self._empty, daemon=True))

    def _empty(self) -> None:
        while True:
            self._unsent.get()

    def send_later(self, data: bytes) -> None:
        """Send *data* after all before, without a wait."""
        start_thread(threading.Thread(target=self.send, args=(data,), daemon=True))

    def finish(self, data: bytes) -> None:
        """Send *data* last of all, unless the client is gone or out of reach."""
        start_thread(threading.Thread(target=self._put_last, args=(data,), daemon=True))
        while True:
            ready = wait_readable([self._input, self._sent_last], self._left())
            if not ready or self._sent_last in ready:
                return
            if not self._hear():
                # After a stop the client has closed the input, and may still read.
                wait_readable([self._sent_last], _LAST_SECONDS)
                return

    def _put_last(self, data: bytes) -> None:
        self._unsent.put(data)
        self._unsent.put(b"")

    def _write(self) -> None:
        while data := self._unsent.get():
            # A client that is gone shows in the input, too. Threads that send must not wait for it.
            with contextlib.suppress(OSError):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._output, rest) :]
        os.eventfd_write(self._sent_last, 1)

    def wait(self, other: int) -> list[tuple[Kind, bytes]] | None:
        """
        Return the next frames; [] once the descriptor *other* is readable.

        None if the client is gone, or out of reach.
        """
        ready = wait_readable([self._input, other], self._left())
        if not ready:
            return None
        if self._input not in ready:
            return []

        data = self._hear()
        # Bytes that are not frames end the agent, as the end of the input does.
        with contextlib.suppress(ValueError):
            return self._reader.feed(data) if data else None
        return None

    def _left(self) -> float | None:
        """Return the seconds for which the client may be silent; None: any time."""
        return None if self._lease is None else max(0.0, self._last_message_at + self._lease - monotonic())

    def _hear(self) -> bytes:
        self._last_message_at = monotonic()
        return os.read(self._input, _CHUNK)


class _Output:
    """The output of this program and its workers, sent in frames."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._forwarded = threading.Semaphore(0)
        """Released by each stream that has sent all that was there at a `flush`."""
        self._flushes: list[int] = []
        """Descriptors that are readable while a stream must be flushed."""
        for stream in _STREAMS:
            source, target = os.pipe()
            os.dup2(target, stream)
            os.close(target)
            os.set_blocking(source, False)
            self._flushes.append(os.eventfd(0, os.EFD_CLOEXEC))
            start_thread(threading.Thread(target=self._forward, args=(stream, source, self._flushes[-1]), daemon=True))

    def _forward(self, stream: int, source: int, flush: int) -> None:
        lines = WholeLines()
        while True:
            ready = wait_readable([source, flush], _OPEN_LINE_SECONDS if lines.is_open else None)
            # At a flush, all that is there, but no wait for processes that hold the pipe longer.
            with contextlib.suppress(BlockingIOError):
                while data := os.read(source, _CHUNK):
                    self._show(stream, lines.add(data))
            if not ready:
                self._show(stream, lines.rest())
            if flush in ready:
                self._show(stream, lines.rest(is_last=True))
                os.eventfd_read(flush)
                self._forwarded.release()

    def _show(self, stream: int, text: bytes) -> None:
        if text:
            self._send(frame(Kind.OUTPUT, bytes([stream]) + text))

    def flush(self, seconds: float = 5.0) -> None:
        """Send the rest, if the client reads it within some time."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for flush in self._flushes:
            os.eventfd_write(flush, 1)
        until = monotonic() + seconds
        for _ in self._flushes:
            self._forwarded.acquire(timeout=max(0.0, until - monotonic()))


@frozen
class _Machine:
    """The facts about this machine that the engine gives."""

    address: str
    workers: int
    """Number of workers if the call's is "auto"; 0: the launch's own."""


class _AgentProgram:
    """This program: it serves one call of the client or, if it *stays*, one after another."""

    def __init__(self, link: _ClientLink, machine: _Machine, *, stays: bool) -> None:
        self._link, self._machine, self._stays = link, machine, stays
        self._output = _Output(link.send)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self._modules = CallModules()
        self._notice = b""
        """The notice of this machine's end, for this call and the later ones."""
        self._node: _Node | None = None
        self._has_served = False
        self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once a job has ended."""

    def run(self) -> None:
        """Serve the client until it is gone, or has the last outcome."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # Ctrl-C in the client's terminal may reach its process group, but only the client decides what it means. A
        # handler, since the programs of workers would inherit that the signal is ignored.
        signal.signal(signal.SIGINT, lambda *_: None)
        self._link.send(MAGIC)
        while self._stays or not self._has_served:
            frames = self._link.wait(self._ended)
            if frames is None:
                self._end_without_input()
                return

            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._ended)
            self._conclude()
            for kind, data in frames:
                self._take(kind, data)
                self._conclude()

    def _end_without_input(self) -> None:
        """End with the present call, whose client is gone, or has stopped it and reads the rest."""
        node = self._node
        if node is None:
            return
        is_read = node.is_stopped
        if not is_read:
            self._link.drop()
            node.stop(None, "its client is gone")
        # Whatever holds the job up, this program must end: its workers end with it.
        wait_readable([self._ended], node.longest_stop())
        if is_read:
            self._conclude()

    def _on_sigterm(self, *_: object) -> None:
        if self._node is None:
            # As without a handler: there is nothing to save.
            os._exit(128 + signal.SIGTERM)
        why = f"{host_name()} is about to end: its agent got SIGTERM"
        self._take(Kind.NOTICE, dumps({"why": why, "seconds": None}).encode())

    def _take(self, kind: Kind, data: bytes) -> None:
        """Do as the client says in one frame; one for a call that is over counts for nothing."""
        if kind is Kind.CALL and self._node is None:
            self._link.send_later(frame(Kind.UP, dumps({"address": _free_endpoint(self._machine.address)}).encode()))
            self._node = _Node(self._machine, self._modules, self._link.send, self._note_end, self._notice)
        if kind is Kind.NOTICE:
            self._notice = data
        if self._node is not None:
            self._node.take(kind, data)

    def _note_end(self) -> None:
        os.eventfd_write(self._ended, 1)

    def _conclude(self) -> None:
        """Send the outcome of the present call, if it is over."""
        node = self._node
        if node is None or not node.is_over():
            return

        self._node, self._has_served = None, True
        self._output.flush()
        last = node.last_frames() + frame(Kind.RESULT, node.outcome())
        if self._stays:
            self._link.send_later(last)
        else:
            self._link.finish(last)


class _Node:
    """One call: its node is launched as soon as the client has sent the job's settings."""

    def __init__(
        self,
        machine: _Machine,
        modules: CallModules,
        send: Callable[[bytes], None],
        on_end: Callable[[], None],
        notice: bytes,
    ) -> None:
        self._machine, self._modules, self._send, self._on_end = machine, modules, send, on_end
        self._notice = notice
        """A notice of the machine's end from before the job, which gets it at its beginning."""
        self._call: Call | None = None
        self._job: Job | None = None
        self._reporter: NodeReporter | None = None
        self._error: BaseException | None = None
        self._world = 0
        self.is_stopped = False
        """True once the client has stopped the call, or is gone."""
        self._grace = 0.0
        """Seconds that the workers get from a stop to SIGKILL."""
        self._end_time = math.inf
        """Unix time at which the job's time ends."""

    def is_over(self) -> bool:
        """Return True if the job has ended, or could not be started."""
        return self._error is not None or (self._job is not None and self._job.done())

    def take(self, kind: Kind, data: bytes) -> None:
        """Do as the client says in one frame."""
        actions = {
            Kind.CALL: self._on_call,
            Kind.BEGIN: self._on_begin,
            Kind.STOP: self._on_stop,
            Kind.ASK: self._on_question,
            Kind.NOTICE: self._on_notice,
        }
        action = actions.get(kind)
        if action is None or self.is_over():
            return
        try:
            action(data)
        # It is the outcome: an agent that ends without one counts as lost, and is replaced.
        except BaseException as error:
            self._error = error

    def _on_call(self, data: bytes) -> None:
        with self._modules.present():
            self._call = unpack_call(data)

    def _on_begin(self, data: bytes) -> None:
        if self._call is None or self._job is not None:
            return
        call = self._call
        settings = JobSettings.unpacked(data)
        config = _config_of(call, settings, self._machine)
        launch = CheckedLaunch(
            config,
            call.entrypoint,
            call.args,
            None,
            call.kwargs,
            is_started=True,
            has_keyboard=False,
            cell_shows_errors=settings.cell_shows_errors,
        )
        job = Job(launch, listener=self._listen)
        job.when_done(self._on_end)
        self._job, self._grace = job.begin(), launch.grace
        self._end_time = math.inf if config.end_time is None else config.end_time
        # At once: the client counts an agent as lost that sends nothing after the begin of its node.
        self._send(_framed(NodeReport.of(self._job.status())))
        seconds = seconds_between_reports(settings.max_nodes)
        self._reporter = NodeReporter(job, lambda report: self._send(_framed(report)), seconds)
        if self._notice:
            self._on_notice(self._notice)

    def _on_question(self, data: bytes) -> None:
        if self._job is not None:
            answer_later(self._job, data, lambda answer: self._send(frame(Kind.ANSWER, answer.packed())))

    def _on_stop(self, data: bytes) -> None:
        self.stop(seconds(parse(data), 0), "its client stopped the call")

    def _on_notice(self, data: bytes) -> None:
        if self._job is None:
            self._notice = data
            return
        notice = parse(data)
        left = None if notice["seconds"] is None else seconds(notice["seconds"], 0)
        self._job.inbox.put(StopRequest(str(notice["why"]), left, is_notice=True))

    def _listen(self, record: records.Record) -> None:
        if isinstance(record, records.RoundStarted):
            self._world = record.world_size

    def stop(self, grace: float | None, why: str) -> None:
        """Ask the workers to stop within *grace* seconds (None: their launch's own), for the reason *why*."""
        self.is_stopped = True
        if self._job is None:
            self._error = SignalException("the agent was stopped before its node began", signal.SIGTERM)
            return
        self._grace = self._grace if grace is None else grace
        self._job.ask_to_stop(f"job {self._job.name!r} was stopped: {why}", self._grace)

    def longest_stop(self) -> float:
        """Return the seconds within which the job ends after `stop`."""
        return 0.0 if self._job is None else self._grace + _END_SECONDS

    def last_frames(self) -> bytes:
        """Return frames with the last report on the workers and the end of their output; empty if there are none."""
        if self._reporter is None or self._job is None:
            return b""
        output = last_output(self._job, self._world)
        return _framed(self._reporter.last()) + frame(Kind.ANSWER, output.packed())

    def outcome(self) -> bytes:
        """Return the outcome of the node."""
        if self._job is None or self._error is not None:
            assert self._error is not None
            return pack_error(self._error, self._world)
        try:
            results = self._job.result()
            return pack_results(results, results.places, self._world)
        except BaseException as error:
            return pack_error(error, self._world, ends_call=self._has_no_time(error))

    def _has_no_time(self, error: BaseException) -> bool:
        """Return True if the end of the job's time has stopped the workers: another agent would not have more."""
        return isinstance(error, SignalException) and wall_time() >= self._end_time - self._grace


def _framed(report: NodeReport) -> bytes:
    return frame(Kind.REPORT, report.packed())


def _config_of(call: Call, settings: JobSettings, machine: _Machine) -> LaunchConfig:
    """Return the settings of this node's launch."""
    config = call.config
    changed: dict[str, Any] = {
        "min_nodes": settings.min_nodes,
        "max_nodes": settings.max_nodes,
        "run_id": settings.run_id,
        "rdzv_endpoint": settings.endpoint,
        "rdzv_configs": {**config.rdzv_configs, "is_host": settings.is_host},
        "token": settings.token,
        "local_addr": machine.address,
        **settings_on_node(call),
    }
    if machine.workers and config.nproc_per_node == "auto":
        changed["nproc_per_node"] = machine.workers
    return evolve(config, **changed)


def _address() -> str:
    """Return the address of this machine at which the client has reached it, else its name."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else host_name()


def _free_endpoint(address: str) -> str:
    """Return the *address* of this machine with a port that was free a moment ago."""
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


if __name__ == "__main__":
    main()
