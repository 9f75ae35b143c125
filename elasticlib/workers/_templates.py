"""
The launcher's handles of its templates: started when none fits, kept warm for the next launch.

Rules of this file: whatever is started here ends with the launcher (`_guardian`); a child that the
caller forks drops all handles, so that it can neither use nor keep alive what is not its own.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from elasticlib._programs import BOOT, KILLED, Link, Process, spawn
from elasticlib._wire import Channel, wait_readable
from elasticlib.errors import EntrypointError, PreloadError, StartError
from elasticlib.workers import _guardian, _report

_TEMPLATE_BOOT = BOOT + "from elasticlib.workers._template import main; main()"
_FRESH_BOOT = BOOT + "from elasticlib.workers._child import run_fresh; run_fresh(int(sys.argv.pop()))"

# Set anew for each program, test or terminal, and read by no library at import.
_NOISE = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "LINES", "COLUMNS", "PYTEST_CURRENT_TEST"})
_PER_LAUNCH = frozenset({"OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE"})
_MOST_TEMPLATES = 2


def fresh_command(python: str, flags: Sequence[str] = ()) -> list[str]:
    """The command of a new interpreter that becomes the worker whose order's descriptor is its last argument."""
    return [python, *flags, "-u", "-c", _FRESH_BOOT]


def importable_by(python: str, environment: Mapping[str, str]) -> bool:
    """Whether the interpreter *python* could be a template: it finds elasticlib and what that needs."""
    command = [python, "-c", BOOT + "import elasticlib.workers._template"]
    try:
        return (
            subprocess.run(command, env=dict(environment), capture_output=True, check=False, timeout=60).returncode == 0
        )
    except OSError as error:
        raise EntrypointError(f"PYTHON_EXEC={python!r} cannot be run: {error.strerror}") from error


@frozen
class TemplateKey:
    """What two launches must have in common to fork their workers from one template."""

    python: str
    preload: tuple[str, ...]
    path: tuple[str, ...]
    environment: frozenset[tuple[str, str]]
    flags: tuple[str, ...] = ()
    """Options of the interpreter."""

    @classmethod
    def of(
        cls, python: str, preload: Sequence[str], path: Sequence[str], environment: Mapping[str, str]
    ) -> TemplateKey:
        """The key of a launch with *environment*; variables that no import reads are left out."""
        kept = {(k, v) for k, v in environment.items() if k not in _NOISE and k not in _PER_LAUNCH}
        return cls(python, tuple(preload), tuple(path), frozenset(kept))


class Template:
    """A running template with its guardian; `link` carries requests to fork."""

    def __init__(self, key: TemplateKey, environment: Mapping[str, str], search_path: Sequence[str]) -> None:
        self.key = key
        self.crews = 0
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._ready = False
        self._stamps = _stamps(key, search_path)
        self._search_path = tuple(search_path)
        self._said = os.memfd_create("template-stderr")
        ours, theirs = Channel.pair()
        self._link = Link(ours)
        asked = json.dumps({"preload": key.preload, "path": list(search_path)})
        guardian = [sys.executable, "-S", "-E", str(Path(_guardian.__file__)), str(os.getpid())]
        self._process: Process | None = None
        """The template itself, once its imports are done."""
        self._guardian = spawn(
            [*guardian, key.python, *key.flags, "-u", "-c", _TEMPLATE_BOOT, asked],
            environment,
            theirs.fileno(),
            self._said,
        )
        theirs.close()

    def alive(self) -> bool:
        """Whether it can still fork, as far as this process has heard."""
        self.listen()
        return self._failure is None

    def ready(self) -> bool:
        """Whether its imports are done."""
        self.listen()
        return self._ready

    def outdated(self) -> bool:
        """Whether the file of a preloaded module, or an archive on its path, changed since the template was made."""
        return self._stamps != _stamps(self.key, self._search_path)

    def request(self, op: str) -> Channel:
        """Have the template fork a child for *op*; the channel to it."""
        ours, theirs = Channel.pair()
        self._wake()
        with self._lock:
            self._link.send({"op": op}, (theirs.fileno(),))
        theirs.close()
        return Link(ours)

    def listen(self) -> Exception | None:
        """Take in what the template has said; the error that ended it, None while it lives."""
        with self._lock:
            while self._failure is None and wait_readable([self._link], 0):
                received = self._link.receive(whole=False)
                if received is None:
                    self._failure = StartError(f"the template process ended unexpectedly{self._last_words()}")
                elif received[0]["op"] == "refused":
                    self._failure = PreloadError(received[0]["module"], received[0]["why"])
                else:
                    self._ready = True
                    self._process = Process(received[0]["pid"], received[1].pop() if received[1] else -1)
                    self._show_warnings()
            return self._failure

    def failure(self) -> Exception:
        """Why a channel from this template ended: its own error, or that the child alone was killed."""
        return self.listen() or StartError("the process that starts the workers was ended from outside")

    def _last_words(self) -> str:
        words = self._words()
        return f": {words}" if words else " (killed from outside, or out of memory)"

    def _words(self) -> str:
        size = os.fstat(self._said).st_size
        return _report.read_exactly(self._said, size).decode(errors="replace").strip()

    def _show_warnings(self) -> None:
        if words := self._words():
            print(words, file=sys.stderr)

    def close(self) -> None:
        """End the template and its guardian, with everything below; return when they are gone."""
        self.listen()
        if not self._ready:
            # Busy with imports it hears nothing; it has forked nothing yet and dies with its guardian.
            self._guardian.send(signal.SIGKILL)
        self._failure = self._failure or StartError("the template was closed")
        self._wake()
        self._link.close()
        if self._process is not None:
            # It sweeps first; what even SIGKILL does not end may take it that long.
            if not self._process.ends(KILLED + 1):
                self._process.kill(0.0)  # its guardian sees to the rest
            self._process.close()
        self._guardian.wait(KILLED + 1)
        os.close(self._said)

    def _wake(self) -> None:
        """Whoever was stopped from outside hears nobody."""
        self._guardian.send(signal.SIGCONT)
        if self._process is not None:
            self._process.send(signal.SIGCONT)

    def drop(self) -> None:
        """Forget the template in a process that was forked from its owner."""
        self._failure = StartError("the template belongs to the process that forked this one")


class _Templates:
    """The templates of this program: at most two, the most recently used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Template] = []

    def take(self, key: TemplateKey, environment: Mapping[str, str], search_path: Sequence[str]) -> Template:
        with self._lock:
            self._end(t for t in self._kept if not t.alive() or (t.crews == 0 and t.outdated()))
            found = next((t for t in self._kept if t.key == key and not t.outdated()), None)
            if found is None:
                found = Template(key, environment, search_path)
            else:
                self._kept.remove(found)
            found.crews += 1
            self._kept.append(found)
            self._end(self._surplus())
            return found

    def give_back(self, template: Template, unused: bool = False) -> None:
        """Let *template* serve others; one that was never used and is still at its imports is ended."""
        with self._lock:
            template.crews -= 1
            if unused and template.crews == 0 and template in self._kept and not template.ready():
                self._end([template])
            self._end(self._surplus())

    def _surplus(self) -> list[Template]:
        idle = [template for template in self._kept if template.crews == 0]
        return idle[: max(0, len(self._kept) - _MOST_TEMPLATES)]

    def _end(self, some: Iterable[Template]) -> None:
        for template in list(some):
            self._kept.remove(template)
            template.close()

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
        for template in kept:
            template.close()

    def drop(self) -> None:
        self._lock = threading.Lock()
        kept, self._kept = self._kept, []
        for template in kept:
            template.drop()


def _stamps(key: TemplateKey, search_path: Sequence[str]) -> dict[str, float]:
    # Archives as a whole: what they hold is not looked at.
    found = {path: os.stat(path).st_mtime_ns / 1e9 for path in search_path if os.path.isfile(path)}
    for module in key.preload:
        if module == "torch":
            continue  # nobody edits it between two cells, and looking for it costs milliseconds
        for folder in (*search_path, *sys.path):
            base = os.path.join(folder or ".", *module.split("."))
            for path in (base + ".py", os.path.join(base, "__init__.py")):
                if os.path.isfile(path) and module not in found:
                    found[module] = os.stat(path).st_mtime_ns / 1e9
    return found


templates = _Templates()
atexit.register(templates.close)


os.register_at_fork(after_in_child=templates.drop)


def count_devices(template: Template) -> tuple[int, str]:
    """How many accelerators torch sees, and their type, asked of a child that is thrown away."""
    answer = template.request("count")
    received = answer.receive()
    answer.close()
    if received is None or "count" not in received[0]:
        raise template.failure() if received is None else StartError(received[0]["why"])
    return received[0]["count"], received[0]["kind"]


def list_gpus(template: Template) -> list[str]:
    """PCI addresses of the GPUs that torch sees, by index, asked of a child that is thrown away."""
    answer = template.request("gpus")
    received = answer.receive()
    answer.close()
    if received is None:
        raise template.failure()
    if "why" in received[0]:
        raise StartError(received[0]["why"])
    return [str(address) for address in received[0]["addresses"]]
