"""
A program that changes what the kernel knows of it, and launches after each change.

`main` writes one JSON line for each row: what differs between the program and its worker, and whether that came from
the same fork server as the one before.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.process import duties

_STATUS = (
    "Uid Gid Groups NoNewPrivs Seccomp Seccomp_filters CapInh CapPrm CapEff CapBnd CapAmb Umask THP_enabled".split()
)
_NAMESPACES = "cgroup ipc mnt net pid user uts".split()
_NOBODY = 65534
_PR_SET_DUMPABLE, _PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK, _PR_CAPBSET_DROP = 4, 29, 30, 24
_PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_THP_DISABLE = 28, 38, 22, 41
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_ADDR_NO_RANDOMIZE = 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def facts() -> dict[str, Any]:
    """Return the attributes that a child process has from its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found: dict[str, Any] = {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        **{name: found.get(name) for name in _STATUS},
        **{name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},
        "host": os.uname().nodename,
        "root": [os.stat("/").st_dev, os.stat("/").st_ino],
        "cgroups": Path("/proc/self/cgroup").read_text(),
        "securebits": _libc.prctl(27, 0, 0, 0, 0),
        "personality": _libc.personality(0xFFFFFFFF),
        "nice": os.nice(0),
        "policy": os.sched_getscheduler(0),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
        "coredump_filter": Path("/proc/self/coredump_filter").read_text(),
        "timer slack": _libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0),
        "dumpable": _libc.prctl(3, 0, 0, 0, 0) == 1,
        "limits": [list(resource.getrlimit(number)) for number in limits],
        "cpus": sorted(os.sched_getaffinity(0)),
        "folder": os.getcwd(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "ignores SIGHUP": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,
    }


def _facts_and_chain() -> tuple[dict[str, Any], dict[str, int]]:
    return facts(), duties.chain()


def _facts_of_a_child() -> dict[str, Any]:
    """Of a program that is executed: it has fewer capabilities than its parent may have."""
    code = "import json; from tests.process.callers.caller_state import facts; print(json.dumps(facts()))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    # By `exec` each program allows others to look into its memory again: a worker of this one does not.
    found: dict[str, Any] = {**json.loads(done.stdout), "dumpable": facts()["dumpable"]}
    return found


def _must(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _prctl(option: int, *values: Any) -> None:
    _must(_libc.prctl(option, *(ctypes.c_ulong(each) if isinstance(each, int) else each for each in values), 0, 0, 0))


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


def _lower_limit(number: int, value: int) -> None:
    resource.setrlimit(number, (value, resource.getrlimit(number)[1]))


def _other_input() -> None:
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 0)


def _filter_nothing() -> None:
    """A filter of system calls that lets all pass."""
    instruction = ctypes.create_string_buffer(struct.pack("@HBBI", 6, 0, 0, 0x7FFF0000))
    program = struct.pack("@HxxxxxxP", 1, ctypes.addressof(instruction))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(program))


def _other_root() -> None:
    """Another root folder, in which all else is where it was."""
    here = os.getcwd()
    root = Path("/tmp", f"elasticlib-root-{os.getpid()}")  # removed with the mount namespace's end, but for the folder
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
    for name in os.listdir("/"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), root / name)
        elif os.path.isdir(f"/{name}"):
            (root / name).mkdir()
            kind = "--bind" if name == "tmp" else "--rbind"  # which holds the new root itself
            subprocess.run(["mount", kind, f"/{name}", root / name], check=True)
    os.chroot(root)
    os.chdir(here)


def _drop_user() -> None:
    os.setgroups([_NOBODY])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    os.environ["HOME"] = "/tmp"


SET_IN_THE_WORKER: dict[str, Callable[[], Any]] = {
    "mask of new files": lambda: os.umask(0o27),
    "soft limit": lambda: _lower_limit(resource.RLIMIT_CORE, 0),
    "hard limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600)),
    "niceness": lambda: os.nice(3),
    "policy": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    "idle policy": lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
    "oom_score_adj": lambda: _write("/proc/self/oom_score_adj", "500"),
    "core dump filter": lambda: _write("/proc/self/coredump_filter", "0x21"),
    "timer slack": lambda: _prctl(_PR_SET_TIMERSLACK, 70_000),
    "CPUs": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "folder": lambda: os.chdir("/"),
    "standard input": _other_input,
    "ignored signal": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    "private memory": lambda: _prctl(_PR_SET_DUMPABLE, 0),
}
"""The fork server stays. In this order in one program: each row has all those before it."""
OF_THE_FORK_SERVER: dict[str, Callable[[], Any]] = {
    "niceness that was raised before": lambda: os.setpriority(os.PRIO_PROCESS, 0, 0),
    "oom_score_adj that was raised before": lambda: _write("/proc/self/oom_score_adj", "0"),
    "policy that was left": lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
    "real-time policy": lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
    "host name": lambda: _must(_libc.unshare(_CLONE_NEWUTS)),
    "IPC": lambda: _must(_libc.unshare(_CLONE_NEWIPC)),
    "mounts": lambda: _must(_libc.unshare(_CLONE_NEWNS)),
    "root folder": _other_root,
    "huge pages": lambda: _prctl(_PR_SET_THP_DISABLE, 1),
    "personality": lambda: _libc.personality(_ADDR_NO_RANDOMIZE),
    "secure bits": lambda: _prctl(_PR_SET_SECUREBITS, 0x40),
    "bounding set": lambda: _prctl(_PR_CAPBSET_DROP, 25),
    "no new privileges": lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1),
    "filter of system calls": _filter_nothing,
    "groups": lambda: os.setgroups([7]),
    "group": lambda: os.setgid(_NOBODY),
    "user": _drop_user,
}
"""Another fork server is started. In this order in one program that began with other values for the first rows."""
BEFORE: list[Callable[[], Any]] = [
    lambda: os.nice(5),
    lambda: _write("/proc/self/oom_score_adj", "300"),
    lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
]
_PARTS = {"set": SET_IN_THE_WORKER, "key": OF_THE_FORK_SERVER}


def main(part: str, method: str) -> None:
    """Go through the rows of *part*, ``set`` or ``key``."""
    from elasticlib import LaunchConfig, elastic_launch  # which a child that tells its facts does without

    config = LaunchConfig(nproc_per_node=1, max_restarts=0, preload=(), start_method=method)  # type: ignore[arg-type]
    launch = elastic_launch(config, _facts_and_chain)
    if part == "key":
        for change in BEFORE:
            change()
    _, former = launch()[0]
    for row, change in _PARTS[part].items():
        try:
            change()
        except OSError as error:  # no privileges for it here
            print(json.dumps({"row": row, "skipped": str(error)}), flush=True)
            continue
        theirs, chain = launch()[0]
        mine = facts() if part == "set" else _facts_of_a_child()
        print(
            json.dumps(
                {
                    "row": row,
                    "differ": {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]},
                    "same fork server": chain["fork server"] == former["fork server"],
                    "former lives": duties.lives(former["fork server"]) or duties.lives(former["reaper"]),
                }
            ),
            flush=True,
        )
        former = chain
