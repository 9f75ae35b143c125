"""
One program in a session of its own, for callers who look after it themselves; and a process of a set in its shape.

Rules of this file: a handler starts one process and signals its group; waiting is the caller's, through `proc`. Sets of
workers do not come from here: they end with their launcher, which such a process does not. What a view knows of a
process of theirs it asks the set.
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
    *entrypoint* with *args*, as text, and *env* on top of this program's environment; `proc` is its ``Popen``. A job's
    token (``ELASTICLIB_TOKEN``) is passed on only where *env* names it.

    *stdout* and *stderr* are paths of files that are written anew; empty or None is this program's own stream.
    *numa_options* binds it, through ``numactl``, to the CPUs near GPU *local_rank_id*. Raises what ``Popen`` and
    ``open`` raise. (torch: ``torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler``)
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
        Send *death_sig* (SIGTERM) to the process and all of its group; nobody left is a success.

        What outlives the process within its group gets it too.
        """
        if self.proc.returncode is not None and os.path.exists(f"/proc/{self.proc.pid}"):
            # It was reaped and its group ended: the number is another process' by now.
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
    """What of a ``subprocess.Popen`` holds for a process of a set: its `pid`, and how it ended."""

    pid: int
    poll: Callable[[], int | None]
    """The exit status, ``-n`` for signal ``n``; None while the process runs."""

    @property
    def returncode(self) -> int | None:
        """As `poll`."""
        return self.poll()


@frozen
class ProcessView:
    """One process of a `SubprocessContext`, in the shape of a `SubprocessHandler`."""

    local_rank_id: int
    proc: ProcessOfSet
    _signal: Callable[[int], None]

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send *death_sig* (SIGTERM) to the process and all that it started; nothing once it has ended."""
        if self.proc.poll() is None:
            self._signal(signal.SIGTERM if death_sig is None else death_sig)
