"""
One program in a session of its own, whose caller waits for it, and a view of a set's process with
the same interface.

Rules of this file: a handler starts one process and signals its group; the caller waits for it
through `proc`. Such a process does not end with its launcher. Sets of workers do, and start
elsewhere: a view asks the set about its process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from subprocess import Popen

from attrs import frozen

from elasticlib.numa import NumaOptions, _maybe_wrap_command_args_with_numa_binding as wrap_command
from elasticlib.workers._environment import without_secrets


class SubprocessHandler:
    """
    A program that runs *entrypoint* with *args*, as text; `proc` is its ``Popen``.

    * *env* is added to this program's environment. A job's token (``ELASTICLIB_TOKEN``) is passed
      on only if *env* names it.
    * *stdout* and *stderr* are paths of files that are overwritten; empty or None is this
      program's own stream.
    * *numa_options* binds it, through ``numactl``, to the CPUs near GPU *local_rank_id*.

    Raises the errors of ``Popen`` and ``open``.

    (torch: ``torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler``)
    """

    def __init__(
        self,
        entrypoint: str,
        args: Sequence[object],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: NumaOptions | None = None,
    ) -> None:
        self.local_rank_id = local_rank_id
        command = wrap_command((entrypoint, *map(str, args)), device_index=local_rank_id, numa_options=numa_options)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) if path else None for path in (stdout, stderr)]
            self.proc: Popen[bytes] = Popen(
                command,
                env={**without_secrets(os.environ), **env},
                stdout=files[0],
                stderr=files[1],
                start_new_session=True,
            )

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """
        Send *death_sig* (SIGTERM) to the process and all of its group; do nothing if none is
        left.

        Processes of its group that outlive it get the signal too.
        """
        if self.proc.returncode is not None and os.path.exists(f"/proc/{self.proc.pid}"):
            # It was reaped and its group ended: another process has the number by now.
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, signal.SIGTERM if death_sig is None else death_sig)


def get_subprocess_handler(
    entrypoint: str,
    args: Sequence[object],
    env: dict[str, str],
    stdout: str | None,
    stderr: str | None,
    local_rank_id: int,
    numa_options: NumaOptions | None = None,
) -> SubprocessHandler:
    """Start a program; see `SubprocessHandler`. (torch: ``...multiprocessing.subprocess_handler``)"""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)


@frozen
class ProcessOfSet:
    """The part of ``subprocess.Popen`` that a process of a set has: its `pid`, and its end."""

    pid: int
    poll: Callable[[], int | None]
    """Return the exit status, ``-n`` for signal ``n``; None while the process runs."""

    @property
    def returncode(self) -> int | None:
        """Same as `poll`."""
        return self.poll()


@frozen
class ProcessView:
    """One process of a `SubprocessContext`, in the shape of a `SubprocessHandler`."""

    local_rank_id: int
    proc: ProcessOfSet
    _signal: Callable[[int], None]

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """
        Send *death_sig* (SIGTERM) to the process and all processes that it started; do nothing
        once it has ended.
        """
        if self.proc.poll() is None:
            self._signal(signal.SIGTERM if death_sig is None else death_sig)
