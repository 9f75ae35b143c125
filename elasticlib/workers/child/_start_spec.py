"""
The order for a worker's start: made by the launcher, sent to the spawner, carried out by the
worker itself. Pure.

Rules of this file: two frozen classes, one for the launcher's part and one for the spawner's.
Each is encoded here and nowhere else. The part that all workers of a launch share is sent once,
then the differences of each worker.
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
    """The launcher's order for one worker; for all workers of a launch if `local_rank` is -1."""

    kind: str = "program"
    """``function``, ``script``, ``package`` (a folder or archive), ``module`` or ``program``."""
    entry: str = ""
    """Name of the module."""
    argv: Sequence[str] = ()
    """The command line; for a program all of it."""
    path0: str = ""
    """The first entry of the search path of a script or module."""
    sys_path: Sequence[str] = ()
    """The caller's search path, for a function."""
    main_file: str | None = None
    """``__main__.__file__`` of the caller, for a function."""
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines of code that is not in a file, by its name."""
    shared: Sequence[str] | None = ()
    """Names of the caller's ``__main__`` that both sides have; None if the caller was forked."""
    args_by_rank: bool = False
    """True if each worker has arguments of its own."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The launcher's variables for all workers."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """This worker's own variables, which override the others."""
    cwd: str = "/"
    """Path of the caller's folder; empty if it was removed."""
    place: Sequence[int] = ()
    """Device and inode of the `cwd` folder: a process that is already in it need not enter it."""
    surroundings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a child of the caller would inherit (`Surroundings.plain`)."""
    affinity: Sequence[int] = ()
    """CPUs that the worker may use."""
    bound: bool = False
    """True if these CPUs were requested: the worker runs on no others."""
    threads: int = 1
    """Number of threads for torch, numpy and others."""
    ignored: Sequence[int] = ()
    """Signals that the caller ignores."""
    signals_group: bool = False
    """
    True if a stop signal is sent to the worker's whole group at once, because its entry point is
    not a Python program.
    """
    fresh: bool = False
    """True if the worker is a new interpreter (``spawn``)."""
    python: Sequence[str] = ()
    """Command of the new interpreter."""
    exit_timeout: tuple[float, bool] = (0.0, False)
    """Seconds for the end of the program, and True if the user chose them."""
    shows_errors: bool = True
    """
    True if a function's exception is also shown on stderr; it is raised in the caller with its
    traceback anyway.
    """
    serves_caller: bool = False
    """
    True if it serves a pool, a test or a cell.

    Its detached processes then end with it even after a success, and rank 0 hosts a store at an
    address that the program sets.
    """
    displays: str | None = None
    """
    Mark of displayed objects in the output; empty if only text is shown, None without a notebook.
    """
    displays_of: Sequence[int] | None = ()
    """The global ranks whose objects are shown; None: all."""
    has_keyboard: bool = True
    """False for functions of a program on another machine, which cannot ask anybody."""
    local_rank: int = -1
    server: str | None = None
    """Path of the socket for torch's debug server."""
    stdout: str | None = None
    """File of the redirected stream; None: the launcher's own."""
    stderr: str | None = None
    unbuffered: bool = False
    """True if the user asked for unbuffered streams: ``python -u`` or PYTHONUNBUFFERED."""

    def plain(self) -> dict[str, Any]:
        """Return all fields as a mapping, for a channel."""
        return dict(vars(self))

    @classmethod
    def of(cls, body: dict[str, Any]) -> Self:
        """Return the object of a mapping that `plain` made."""
        return cls(**body)

    def differences(self, common: Self) -> dict[str, Any]:
        """Return the fields that differ from *common*."""
        mine = self.plain()
        return {name: mine[name] for name, value in common.plain().items() if mine[name] != value}

    def with_differences(self, body: dict[str, Any]) -> Self:
        """Return the spec of one worker, made from this common one and its differences."""
        return replace(self, **body)

    def environment(self, changed: Mapping[str, str | None]) -> dict[str, str]:
        """
        Return the worker's variables.

        *changed* are those that the fork server's interpreter set, or removed (None).
        """
        given = {**self.env, **changed, **self.variables}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Handed:
    """
    The spawner's part of an order: descriptors, and the identities with which a worker checks
    them.
    """

    environment: Mapping[str, str]
    streams: Sequence[int]
    """Stdin, stdout and stderr."""
    report: int
    """File for the worker's result or error."""
    identity: tuple[int, int]
    """Device and inode of the `report` file."""
    faults: int
    """File for the stacks of a crash."""
    tail: int
    """File for the last lines of stderr."""
    notices: int
    """The pipe for announcements of the program's outcome."""
    notices_identity: tuple[int, int]
    release: int
    """
    The pipe that becomes readable when functions that have returned need not wait for each other
    any more.
    """
    release_identity: tuple[int, int]
    spawner: int
    """Process id of the spawner, which holds all of these, too."""
    memories: Mapping[str, int] = field(default_factory=dict)
    """
    Memory with the pickled ``function``, and with the ``definitions`` of the caller's
    ``__main__``.

    Also with the text of a ``script`` that came through a pipe.
    """
    inherit: Sequence[int] = ()
    """Descriptors that a new interpreter inherits."""
    pid: int = 0
    """The worker's own process id; a process that it forks has another one."""

    def left(self) -> tuple[int, int, int]:
        """Return the descriptors of the files that the worker leaves behind."""
        return self.report, self.faults, self.tail


def both(spec: StartSpec, handed: Handed) -> dict[str, Any]:
    """Return both parts as a mapping, for a new interpreter."""
    return {"spec": spec.plain(), "handed": vars(handed)}


def from_both(body: dict[str, Any]) -> tuple[StartSpec, Handed]:
    """Return the two parts of a mapping that `both` made, after a conversion to JSON."""
    pairs = {each.name: tuple(body["handed"][each.name]) for each in fields(Handed) if "identity" in each.name}
    return StartSpec.of(body["spec"]), Handed(**{**body["handed"], **pairs})
