"""
Runs a command as on an old kernel, or in a container whose seccomp profile is old.

    python -m tests.matrix.old_kernel [--error EPERM] [COMMAND ...]

The command, which is by default all of ``tests/process``, and whatever it starts find no pidfds and no files in memory,
nor other calls that came late. Old kernels answer ENOSYS, old profiles EPERM.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping

SILENT = (
    "console/test_cell_bars.py::test_bars_of_several_ranks_stay_bars_and_files_have_all",
    "console/test_cli.py::test_a_job_that_succeeds_exits_with_0",
    "console/test_cli.py::test_a_script_that_ends_well_is_a_success",
    "ends/test_exit_timeout.py::test_threads_of_a_script_work_on_until_a_status_or_timeout[by default]",
    "starting/test_fresh_program.py::test_daemon_thread_that_catches_its_end_does_not_end_the_process",
    "calls/test_job.py::test_a_process_that_the_program_forks_has_no_jobs",
)
"""Tests of ``tests/process`` that hold that a launch says nothing: here it says which guarantee is weaker."""
TESTS = (
    *(sys.executable, "-m", "pytest", "-q", "tests/process"),
    *(f"--deselect=tests/process/{name}" for name in SILENT),
)
_LATE = {"pidfd_send_signal": 424, "pidfd_open": 434, "clone3": 435, "close_range": 436, "faccessat2": 439}
CALLS = {
    "x86_64": {"memfd_create": 319, **_LATE},
    "aarch64": {"memfd_create": 279, **_LATE},
}
"""The numbers of the calls that are refused, by machine."""
NEVER_EPERM = frozenset({"clone3"})
"""The C library asks for another call only where this one is said not to be there."""
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_RETURN_ERRNO, _RETURN_ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def instructions(answers: Mapping[int, int]) -> bytes:
    """A program of the kernel's filter machine that answers the calls of these numbers with these errors."""
    found = struct.pack("HBBI", _LOAD, 0, 0, 0)
    for number, error in answers.items():
        found += struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, number)
        found += struct.pack("HBBI", _RETURN, 0, 0, _RETURN_ERRNO | error)
    return found + struct.pack("HBBI", _RETURN, 0, 0, _RETURN_ALLOW)


def refuse(error: int, only: frozenset[str] = frozenset()) -> None:
    """Make the kernel refuse late calls of this process and its new children; *only* these, if given."""
    calls = CALLS[platform.machine()]
    answers = {
        number: errno.ENOSYS if name in NEVER_EPERM else error
        for name, number in calls.items()
        if not only or name in only
    }
    content = ctypes.create_string_buffer(instructions(answers))
    program = _Program(len(content.raw) // 8, ctypes.addressof(content))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *more in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(option, *more) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def main() -> None:
    """Become the command, under the filter."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.old_kernel", description=__doc__)
    parser.add_argument("--error", choices=("ENOSYS", "EPERM"), default="ENOSYS", help="what the calls answer")
    parser.add_argument("--only", action="append", default=[], metavar="CALL", help="refuse this call and not all")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: the tests of tests/process")
    options = parser.parse_args()
    command = options.command or TESTS
    refuse(getattr(errno, options.error), frozenset(options.only))
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main()
