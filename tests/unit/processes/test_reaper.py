"""Nothing outlives the launcher: who is family, and that all of it is swept away."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticlib import processes
from elasticlib.processes import _reaper
from tests.patching import replace_everywhere

LIMIT = 60.0
ROOT = Path(_reaper.__file__).parents[2]
Sleeper = Callable[..., int]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """Starts children that sleep."""
    started: list[int] = []

    def start(program: str | None = None) -> int:
        path = program or shutil.which("sleep") or "sleep"
        started.append(os.posix_spawn(path, [path, "60"], {}))
        return started[-1]

    yield start
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def of(pid: int, members: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    return [member for member in members if member[0] == pid]


def test_child_is_a_descendant_with_any_program_name(sleeper: Sleeper, tmp_path: Path) -> None:
    odd = tmp_path / "x) R 1 (y"
    odd.symlink_to(shutil.which("sleep") or "sleep")

    pid = sleeper(str(odd))

    ((_, parent, state),) = of(pid, _reaper.descendants(os.getpid()))
    assert parent == os.getpid()
    assert state in "RSD"


def test_spared_process_is_left_out(sleeper: Sleeper) -> None:
    one, other = sleeper(), sleeper()

    members = _reaper.descendants(os.getpid(), spare={one})

    assert of(one, members) == []
    assert of(other, members) != []


def test_a_process_without_children_has_no_family(sleeper: Sleeper) -> None:
    assert _reaper.descendants(sleeper()) == []


def test_signal_to_an_ended_process_raises_no_error() -> None:
    ended = os.posix_spawn("/bin/true", ["true"], {})
    handle = processes.handle_of(ended)
    os.waitpid(ended, 0)

    _reaper.signal_process(handle, signal.SIGTERM)

    handle.close()
    with pytest.raises(ProcessLookupError):
        os.kill(ended, 0)


def test_a_number_that_a_stranger_has_by_now_is_not_swept() -> None:
    """A descendant that was listed ends, and the kernel gives its number away, before it is killed."""
    script = (
        "import os, signal, subprocess\n"
        "from elasticlib.processes import _reaper\n"
        "_reaper.adopt_orphans()\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "listed = _reaper.descendants(os.getpid())\n"
        "_reaper.descendants = lambda root, spare=(), kept=(): [(os.getppid(), child.pid, 'S'), *listed]\n"
        "signalled = []\n"
        "note = lambda handle, signum: signalled.append(open(f'/proc/self/fdinfo/{handle.fileno()}').read())\n"
        "_reaper.signal_process = note\n"
        "_reaper.kill_descendants(limit=0.0)\n"
        "print([f'Pid:\\t{child.pid}\\n' in each for each in signalled])\n"
        "child.kill()\n"
    )

    assert outcome(script) == "[True]"


def test_a_process_that_runs_has_not_begun_to_end(sleeper: Sleeper) -> None:
    assert not _reaper.is_ending(sleeper())


def test_zombie_and_missing_process_count_as_ended() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    zombie = _reaper.is_ending(pid)
    os.waitpid(pid, 0)

    assert zombie
    assert _reaper.is_ending(pid)


@pytest.mark.parametrize(("flags", "ending"), [(0x400100, False), (0x40010C, True), (0x4, True)])
def test_a_process_that_the_kernel_takes_down_has_begun_to_end(
    flags: int, ending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = f"7 (a (bad) name) R 1 7 7 0 -1 {flags} 100 0".encode()
    monkeypatch.setattr(_reaper, "open", lambda path, mode: io.BytesIO(stat), raising=False)

    assert _reaper.is_ending(7) is ending


SPARES_WHAT_REMOVES_MEMORY = """
import os, signal, subprocess, sys
from multiprocessing import resource_tracker, shared_memory
from elasticlib.processes import _reaper
_reaper.adopt_orphans()
sys.warnoptions.append("ignore")
memory = shared_memory.SharedMemory(create=True, size=1)
tracker = resource_tracker._resource_tracker
subprocess.Popen(["sleep", "60"])
os.kill(tracker._pid, signal.SIGSTOP)
print(_reaper.kill_descendants())
os.close(tracker._fd)
os.waitpid(tracker._pid, 0)
print(os.path.exists("/dev/shm/" + memory.name.lstrip("/")))
"""

STOPS_NOBODY = """
from elasticlib.processes import _reaper
_reaper.adopt_orphans()
print(_reaper.kill_descendants(), _reaper.kill_descendants(limit=0.0))
"""

KILLS_ALL = """
import os, signal, subprocess, sys
from elasticlib.processes import _reaper
_reaper.adopt_orphans()
INNER = (
    "import os, signal, subprocess, sys;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "grandchild = subprocess.Popen(['sleep', '60'], start_new_session=True);"
    "print(os.getpid(), grandchild.pid, flush=True);"
    "signal.pause() if sys.argv[1] == 'stays' else os._exit(0)"
)
pids = []
for how in ("stays", "goes"):
    child = subprocess.Popen([sys.executable, "-c", INNER, how], start_new_session=True, stdout=subprocess.PIPE)
    pids += [int(pid) for pid in child.stdout.readline().split()]
print(_reaper.kill_descendants(), end=" ")
print([pid for pid in pids if os.path.exists(f"/proc/{pid}")], _reaper.descendants(os.getpid()))
"""

SPARES_ONE = """
import os, subprocess
from elasticlib.processes import _reaper
_reaper.adopt_orphans()
spared, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
print(_reaper.kill_descendants(spare={spared.pid}), spared.poll(), os.path.exists(f"/proc/{other.pid}"))
spared.kill()
"""

KILLS_WHOM_ONLY_THREADS_KEEP_ALIVE = """
import os, platform, subprocess, sys
from elasticlib.processes import _reaper
_reaper.adopt_orphans()
INNER = (
    "import ctypes, threading, time;"
    "threading.Thread(target=time.sleep, args=(60,)).start();"
    "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}['" + platform.machine() + "'], 0)"
)
child = subprocess.Popen([sys.executable, "-c", INNER])
while [state for pid, _, state in _reaper.descendants(os.getpid()) if pid == child.pid] != ["Z"]:
    pass
left = _reaper.kill_descendants(limit=1.0)
alive = os.path.exists(f"/proc/{child.pid}/task")
child.kill()
print(left, alive)
"""


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


def outcome(script: str, *args: str) -> str:
    done = run(script, *args)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "result"),
    [
        pytest.param(STOPS_NOBODY, "[] []", id="no descendants"),
        pytest.param(KILLS_ALL, "[] [] []", id="of all sessions"),
        pytest.param(SPARES_ONE, "[] None False", id="spares one"),
        pytest.param(KILLS_WHOM_ONLY_THREADS_KEEP_ALIVE, "[] False", id="whose first thread has ended"),
        # The tracker waits for this process, the last that has the memory: nobody waits for that.
        pytest.param(SPARES_WHAT_REMOVES_MEMORY, "[]\nFalse", id="spares and wakes what removes memory"),
    ],
)
def test_a_sweep_kills_and_reaps_all_descendants_but_the_spared(script: str, result: str) -> None:
    assert outcome(script) == result


def test_only_trackers_and_managers_remove_shared_memory(sleeper: Sleeper, tmp_path: Path) -> None:
    manager = tmp_path / "torch_shm_manager"
    manager.symlink_to(shutil.which("sleep") or "sleep")

    pids = sleeper(str(manager)), sleeper()
    while any((_reaper.process_facts(pid) or [b""])[0] != b"S" for pid in pids):
        pass  # the kernel still loads the program

    assert [_reaper.is_memory_cleaner(pid) for pid in pids] == [True, False]


@pytest.mark.parametrize(("looks", "is_one"), [(0, True), (3, True), (1000, False)])
def test_memory_cleaner_is_found_after_a_short_uninterruptible_sleep(
    looks: int, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page fault is one; the command of a process that stays there must not be read."""
    states = iter([[b"D"]] * looks)
    replace_everywhere(monkeypatch, _reaper, "process_facts", lambda pid: next(states, [b"S"]))
    command = [sys.executable, "-c", "0  # resource_tracker import main\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            pass  # it is at its exec
        assert is_one is _reaper.is_memory_cleaner(process.pid)
        process.kill()


GUARDED = """
import fcntl, os, signal, subprocess, sys
ours, theirs = (fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in os.pipe())
os.dup2(theirs, 3)
os.close(theirs)
guarded = "setsid sleep 60 & echo $$ $! >&3; exec 3>&-; wait"
command = [sys.executable, "-S", "-E", sys.argv[1], str(os.getpid()), "/bin/sh", "-c", guarded]
reaper = subprocess.Popen(command, pass_fds=[3])
os.close(3)
child, grandchild = (int(pid) for pid in os.read(ours, 100).split())
os.kill(child, signal.SIGKILL)
print(reaper.wait(), os.path.exists(f"/proc/{grandchild}"))
"""


@pytest.mark.slow
def test_a_reaper_ends_with_its_child_and_takes_all_descendants_along() -> None:
    """Its status is the signal that ended the child."""
    assert outcome(GUARDED, str(_reaper.__file__)) == "9 False"


MISSING = """
import os, subprocess, sys
os.dup2(2, 3)
subprocess.run([sys.executable, "-S", sys.argv[1], str(os.getpid()), "/no/such/program"], pass_fds=[3])
"""


@pytest.mark.slow
def test_reaper_reports_a_program_that_cannot_run() -> None:
    assert (
        run(MISSING, str(_reaper.__file__)).stderr
        == "cannot run /no/such/program: [Errno 2] No such file or directory\n"
    )


@pytest.mark.slow
def test_process_that_dies_with_its_parent_ends_if_parent_has_ended() -> None:
    done = run("from elasticlib.processes import die_with_parent; die_with_parent(1); print('alive')")

    assert (done.returncode, done.stdout) == (1, "")
