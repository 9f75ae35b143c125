"""
What a worker is started with: made by the launcher, sent to the spawner, obeyed by the worker itself. Pure.

Rules of this file: two frozen classes, one for what the launcher says and one for what the spawner adds to it; each is
encoded here and nowhere else. What all workers of a launch have in common is sent once, then each one's differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


STDIN = "-"
"""The name of the script that Python reads from its standard input."""


@dataclass(frozen=True, kw_only=True)
class StartSpec:
    """What the launcher wants of one worker; of all workers of a launch, where `local_rank` is -1."""

    kind: str = "program"
    """``function``, ``script``, ``package`` (a folder or archive), ``module`` or ``program``."""
    entry: str = ""
    """Name of the module."""
    argv: Sequence[str] = ()
    """The command line; of a program it is all of it."""
    path0: str = ""
    """What Python puts first on the search path of a script or module."""
    sys_path: Sequence[str] = ()
    """The caller's search path, for a function."""
    main_file: str | None = None
    """``__main__.__file__`` of the caller, for a function."""
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines of code that is in no file, by its name."""
    shared: Sequence[str] | None = ()
    """Names of the caller's ``__main__`` that both sides have; None where the caller was forked."""
    args_by_rank: bool = False
    """Whether each worker has arguments of its own."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The launcher's variables for all workers."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """This worker's own, which beat them."""
    cwd: str = "/"
    """Path of the caller's folder; empty where that was removed."""
    place: Sequence[int] = ()
    """Device and inode of that folder: a process that is there need not enter it."""
    surroundings: Mapping[str, Any] = field(default_factory=dict)
    """What a child of the caller would have (`Surroundings.plain`)."""
    affinity: Sequence[int] = ()
    """CPUs."""
    bound: bool = False
    """Whether these CPUs were asked for: the worker runs on no others."""
    threads: int = 1
    """What torch, numpy and others compute with."""
    ignored: Sequence[int] = ()
    """Signals that the caller ignores."""
    signals_group: bool = False
    """Whether a stop signal is for the worker's whole group at once: its entry point is no Python program."""
    fresh: bool = False
    """Whether the worker is a new interpreter (``spawn``)."""
    python: Sequence[str] = ()
    """The command of that interpreter."""
    exit_timeout: tuple[float, bool] = (0.0, False)
    """Seconds for the end of the program, and whether that was chosen."""
    shows_errors: bool = True
    """Whether a function's exception is shown on stderr, too: it is raised in the caller, with its traceback."""
    serves_caller: bool = False
    """
    Whether it serves a pool, a test or a cell: what it detached ends with it also where it succeeds, and rank 0 hosts a
    store at an address of the program's own.
    """
    displays: str | None = None
    """Marks what a function displays in its output; empty where only text is shown, None where none is a notebook's."""
    displays_of: Sequence[int] | None = ()
    """The global ranks whose objects are shown; None: all."""
    local_rank: int = -1
    server: str | None = None
    """Path of the socket for torch's debug server."""
    stdout: str | None = None
    """File of the redirected stream; None: the launcher's own."""
    stderr: str | None = None

    def plain(self) -> dict[str, Any]:
        """All of it, for a channel."""
        return dict(vars(self))

    @classmethod
    def of(cls, body: dict[str, Any]) -> Self:
        """What `plain` made."""
        return cls(**body)

    def differences(self, common: Self) -> dict[str, Any]:
        """What `common` does not say."""
        mine = self.plain()
        return {name: mine[name] for name, value in common.plain().items() if mine[name] != value}

    def with_differences(self, body: dict[str, Any]) -> Self:
        """The spec of one worker, of the common one and its differences."""
        return replace(self, **body)

    def environment(self, changed: Mapping[str, str | None]) -> dict[str, str]:
        """The worker's variables; *changed* are those that the fork server's interpreter set, or removed (None)."""
        given = {**self.env, **changed, **self.variables}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Handed:
    """What the spawner hands to a worker: descriptors, and what tells that they still are what they were."""

    environment: Mapping[str, str]
    streams: Sequence[int]
    """Stdin, stdout and stderr."""
    report: int
    """Where the worker leaves its result or its error."""
    identity: tuple[int, int]
    """Of that memory: device and inode."""
    faults: int
    """For the stacks of a crash."""
    tail: int
    """For the last lines of stderr."""
    notices: int
    """The pipe for what becomes of the program."""
    notices_identity: tuple[int, int]
    release: int
    """The pipe that is written to when functions that have returned need not wait for each other any more."""
    release_identity: tuple[int, int]
    spawner: int
    """Process id of the spawner, which holds all of these, too."""
    memories: Mapping[str, int] = field(default_factory=dict)
    """
    Memory with the pickled ``function``, and with what the caller's ``__main__`` defines (``definitions``).

    With the text of a ``script`` that came through a pipe, too.
    """
    inherit: Sequence[int] = ()
    """Descriptors that a new interpreter inherits."""
    pid: int = 0
    """Of the worker, as it finds itself: a process that it forks is another one."""

    def left(self) -> tuple[int, int, int]:
        """What the worker leaves behind."""
        return self.report, self.faults, self.tail


def both(spec: StartSpec, handed: Handed) -> dict[str, Any]:
    """For a new interpreter."""
    return {"spec": spec.plain(), "handed": vars(handed)}


def from_both(body: dict[str, Any]) -> tuple[StartSpec, Handed]:
    """What `both` made, after it was JSON."""
    pairs = {each.name: tuple(body["handed"][each.name]) for each in fields(Handed) if "identity" in each.name}
    return StartSpec.of(body["spec"]), Handed(**{**body["handed"], **pairs})
