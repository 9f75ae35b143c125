"""
Functions that the workers of the process tests run; the module does not import pytest.

Each function reports its findings. A worker reports that it runs by a file of its own in the given
folder. The file holds the pids of the worker and of the processes above it. The test decides how
the worker ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
CHAIN = ("worker", "spawner", "fork server", "reaper")


def parent_of(pid: int) -> int:
    """The parent of a process."""
    _, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    return int(parent)


def chain() -> dict[str, int]:
    """Pids from this worker up to the reaper."""
    spawner = os.getppid()
    fork_server = parent_of(spawner)
    return dict(zip(CHAIN, (os.getpid(), spawner, fork_server, parent_of(fork_server)), strict=True))


def write_whole(path: Path, text: str) -> None:
    """Make a file that is whole as soon as it is there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def at_work(folder: Path) -> None:
    """Say that this worker runs, and who runs above it."""
    name = f"round{os.environ['TORCHELASTIC_RESTART_COUNT']}.rank{os.environ['RANK']}"
    write_whole(folder / name, " ".join(map(str, chain().values())))


def works_on_in_round(first: int, folder: Path) -> dict[str, int]:
    """Waits to be ended, but returns from round *first* on."""
    at_work(folder)
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < first:
        time.sleep(60)  # stands for work; the test ends it
    return chain()


def variable(name: str) -> tuple[str | None, int]:
    """Return the value of the variable in this worker, and the pid of its fork server."""
    return os.environ.get(name), chain()["fork server"]


def fails() -> None:
    """The plainest failure."""
    raise ValueError("a bad value")


def waits_for(begun: Path, go: Path) -> None:
    """Says that it has begun, and ends when *go* is there."""
    begun.touch()
    wait_until(go.exists)


def meet(folder: Path, mine: int, count: int) -> int:
    """Ends when *count* workers have come here."""
    (folder / str(mine)).touch()
    wait_until(lambda: len(os.listdir(folder)) == count)
    return mine


def launches(preload: tuple[str, ...]) -> dict[int, Any]:
    """A launch of two workers from within this worker."""
    from elasticlib import LaunchConfig, elastic_launch

    config = LaunchConfig(nproc_per_node=2, max_restarts=0, preload=preload, run_id="inner")
    return elastic_launch(config, _own_numbers)()


def _own_numbers() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))


def product_by_numpy() -> float:
    """A product large enough for the BLAS library's own threads."""
    import numpy

    ones = numpy.ones((256, 256))
    return float((ones @ ones).sum())


def modules_before(*names: str) -> dict[str, bool]:
    """Which modules were there when the worker began."""
    return {name: name in sys.modules for name in names}


def note_signals(folder: Path, *, ignores: bool = False, cleans_up_for: float = 0.0) -> None:
    """
    Write the name of the signal that comes and end, or only write it; start a grandchild that ignores all.

    It ends with 3: what it has detached would outlive a job whose ranks all end with 0.
    """

    def handle(signum: int, frame: object) -> None:
        time.sleep(cleans_up_for)  # stands for a checkpoint that is written
        write_whole(folder / f"rank{os.environ['RANK']}.{signal.Signals(signum).name}", "")
        if not ignores:
            sys.exit(3)

    for signum in STOP_SIGNALS:
        signal.signal(signum, handle)
    kept = [signal.signal(signum, signal.SIG_IGN) for signum in STOP_SIGNALS]
    grandchild = subprocess.Popen(["sleep", "60"], start_new_session=True)
    for signum, handler in zip(STOP_SIGNALS, kept, strict=True):
        signal.signal(signum, handler)
    write_whole(folder / f"pids{grandchild.pid}", str(grandchild.pid))
    at_work(folder)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(60)  # stands for work; a signal that is only noted does not end it


def saves_until(go: Path, folder: Path) -> None:
    """Ends by a stop signal, after a checkpoint that is written when *go* is there; a second signal spoils it."""

    def handle(signum: int, frame: object) -> None:
        if (folder / f"saving{os.environ['RANK']}").exists():
            os._exit(5)
        write_whole(folder / f"saving{os.environ['RANK']}", "")
        wait_until(go.exists, 60.0)
        write_whole(folder / f"saved{os.environ['RANK']}", "")
        sys.exit(0)

    for signum in STOP_SIGNALS:
        signal.signal(signum, handle)
    at_work(folder)
    time.sleep(60)  # stands for work; the signal ends it


def writes_in_native_code(folder: Path, seconds: int) -> None:
    """Rank 0 has a file open that a native call writes for *seconds*; the other one waits, in native code too."""
    if os.environ["RANK"] != "0":
        sits_in_native_code(folder)
    with open(folder / "checkpoint", "wb") as file:
        try:
            _in_native_code_for(folder, seconds)
        finally:
            file.write(b"whole")
            write_whole(folder / "saved0", "")


def _in_native_code_for(folder: Path, seconds: int) -> None:
    mutex, clock, libc = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.clock_gettime(0, clock)
    clock[0] += seconds
    at_work(folder)
    libc.pthread_mutex_timedlock(mutex, clock)  # no signal brings it back


def _with_a_child(folder: Path) -> int:
    """Fork a child that takes its time to save when it gets SIGTERM; its number."""
    rank, ready = os.environ["RANK"], os.eventfd(0)
    pid = os.fork()
    if pid == 0:

        def handle(signum: int, frame: object) -> None:
            write_whole(folder / f"signalled{rank}", "")
            time.sleep(0.5)  # stands for what it writes
            write_whole(folder / f"child{rank}", "")
            os._exit(0)

        signal.signal(signal.SIGTERM, handle)
        os.eventfd_write(ready, 1)
        time.sleep(60)  # stands for work
        os._exit(1)
    os.eventfd_read(ready)
    return pid


def saves_with_a_child(folder: Path) -> None:
    """Ends by SIGTERM, after it has saved, if its child lives until then."""

    def handle(signum: int, frame: object) -> None:
        time.sleep(0.5)  # stands for a checkpoint
        if not (folder / f"signalled{os.environ['RANK']}").exists():
            write_whole(folder / f"saved{os.environ['RANK']}", "")
        os._exit(0)

    signal.signal(signal.SIGTERM, handle)
    _with_a_child(folder)
    at_work(folder)
    time.sleep(60)  # stands for work


def leaves_the_end_to_a_child(folder: Path) -> None:
    """Takes no notice of SIGTERM, and ends with its child."""
    pid = _with_a_child(folder)
    signal.signal(signal.SIGTERM, lambda *_: None)
    at_work(folder)
    os.waitpid(pid, 0)


def works_and_notes(folder: Path, signum: signal.Signals, *, handles: bool) -> None:
    """Works on until the file ``go`` is there; where it *handles* the signal, notes that it came, once."""
    if handles:
        signal.signal(signum, lambda *_: os.mkfifo(folder / f"rank{os.environ['RANK']}.{signum.name}"))
    pid = os.fork()
    if pid == 0:
        wait_until((folder / "go").exists, 60.0)
        os._exit(0)
    at_work(folder)
    wait_until((folder / "go").exists, 60.0)
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("the child heard of the signal, too")


def sends_its_launcher(launcher: int, signum: int) -> None:
    """Signals the program that launched it."""
    os.kill(launcher, signum)


def stops_its_job_at_once(launcher: int, go: Path, saved: Path) -> None:
    """Rank 0 has the launcher stopped when *go* is there, and saves when it is asked to end."""
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, lambda *_: write_whole(saved, "all") or sys.exit())
        wait_until(go.exists)
        os.kill(launcher, signal.SIGTERM)
    time.sleep(60)  # stands for work


def sits_in_native_code(folder: Path) -> None:
    """Waits where no signal brings Python back: for a lock of the C library that nobody gives up."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    at_work(folder)
    lock(mutex)


def waits_in_a_collective(folder: Path, where: str) -> None:
    """All but the last rank wait in an all_reduce, the last one elsewhere: it never completes."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    other = distributed.new_group()
    distributed.barrier()
    if distributed.get_rank() < distributed.get_world_size() - 1:
        at_work(folder)
        distributed.all_reduce(torch.ones(1))
    match where:
        case "another collective":
            at_work(folder)
            distributed.all_reduce(torch.ones(1), group=other)
        case "a C call":
            sits_in_native_code(folder)
        case "a lock":
            at_work(folder)
            lock = threading.Lock()
            with lock, lock:
                pass
        case "a sleep":
            at_work(folder)
            time.sleep(600)


def saves_when_interrupted(folder: Path, seconds: float) -> None:
    """Simulate a training without a handler: when interrupted, it saves for *seconds*, then reports it."""
    at_work(folder)
    try:
        time.sleep(600)  # stands for work
    finally:
        time.sleep(seconds)  # stands for a checkpoint that is written
        write_whole(folder / f"saved{os.environ['RANK']}", "")


def fails_beside_a_stopped_one(folder: Path) -> str:
    """In the first round rank 0 stops itself, and then rank 1 fails; returns the round."""
    mark = folder / "stopped"
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "0":
            write_whole(mark, str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)  # stands for work
        wait_until(mark.exists)
        pid = mark.read_text()
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T")
        fails()
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def fails_beside(folder: Path) -> None:
    """Fails once the one that ends badly is ready for it."""
    wait_until((folder / "ready").exists)
    fails()


def fails_when_stopped(folder: Path) -> None:
    """Ends badly when it is told to end."""

    def handle(signum: int, frame: object) -> None:
        raise RuntimeError("could not save")

    signal.signal(signal.SIGTERM, handle)
    (folder / "ready").touch()
    time.sleep(60)  # stands for work; the stop ladder ends it


def leaves_error_file(content: str) -> str:
    """Ends with status 7 and an error file of its own making; returns the round from the second on."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(content, encoding="latin-1")
        os._exit(7)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


class UnshowableError(Exception):
    """An exception with a mistake of its own."""

    def __str__(self) -> str:
        raise TypeError("no text")


def raises_what_cannot_be_shown() -> None:
    raise UnshowableError


class HoldsALockError(ValueError):
    """An exception with a field that cannot be pickled, and one that can."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()
        self.code = 5


def raises_what_cannot_be_pickled_whole() -> None:
    raise HoldsALockError("a bad value")


def raises_text(text: str) -> None:
    raise ValueError(text)


def raises_a_chain() -> None:
    try:
        raise KeyError("first")
    except KeyError as error:
        raise RuntimeError("second") from error


def fails_in_a_collective(end: str) -> None:
    """Rank 1 ends while the others wait for it in gloo; these ignore the stop signal until they have failed too."""
    import torch
    from torch import distributed

    if os.environ["RANK"] != "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    distributed.init_process_group("gloo")
    distributed.all_reduce(torch.ones(1))
    if os.environ["RANK"] == "1":
        match end:
            case "raises":
                fails()
            case "exits":
                os._exit(4)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "quits":
                sys.exit(3)
    distributed.all_reduce(torch.ones(1))


def works_until(go: Path, folder: Path) -> None:
    """Says that it works, and ends when *go* is there."""
    at_work(folder)
    wait_until(go.exists, 60.0)


def loses_the_store(folder: Path, does: str) -> str:
    """
    In the first round rank 0 kills the process that hosts the store; then all wait, or ask the store.

    In the second one it does so when both functions have returned.
    """
    import torch
    from torch import distributed

    from elasticlib.processes import _reaper

    distributed.init_process_group("gloo")
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    distributed.all_gather(pids, torch.tensor([os.getpid()]))

    def kill() -> None:
        spawner = os.getppid()
        children = {pid for pid, parent, _ in _reaper.descendants(spawner) if parent == spawner}
        (host,) = children - {int(pid) for pid in pids}
        write_whole(folder / "store", str(host))
        os.kill(host, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{host}"))

    def kill_at_the_end() -> None:
        wait_until(lambda: not os.path.exists(f"/proc/{int(pids[1])}"))
        kill()

    is_first = os.environ["RANK"] == "0"
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if is_first:
            kill()
        if does == "talks":
            wait_until((folder / "store").exists)
            distributed.distributed_c10d._get_default_store().get("never set")
        time.sleep(60)  # stands for work; the end of the store ends it
    if is_first:
        atexit.register(kill_at_the_end)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def loses_its_spawner(go: Path | None) -> str:
    """In the first round rank 0 kills the process that started it, once *go* is there; return the count of restarts."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "0":
            if go is not None:
                wait_until(go.exists)
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # stands for work
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def dies_slowly_in_a_collective(rank: int) -> str:
    """In the first round *rank* is killed while it holds much memory in files; returns the number of restarts."""
    import torch
    from torch import distributed

    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dies = first and os.environ["RANK"] == str(rank)
    for index in range(2):  # the kernel closes its files one after the other: these before or after its sockets
        if dies:
            os.posix_fallocate(os.memfd_create("much"), 0, 256 << 20)
        if index == 0:
            distributed.init_process_group("gloo")
    value = torch.ones(100_000)
    for step in range(100_000 if first else 3):
        if dies and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.all_reduce(value)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def fails_once() -> str:
    """Fails in the first round; returns which one it is."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fails()
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def works_and_fails_once(go: Path, folder: Path) -> str:
    """Works until *go* is there, and then fails in the first round; returns which one it is."""
    works_until(go, folder)
    return fails_once()
