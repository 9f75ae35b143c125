"""
Messages between a test's own process and its ranks: the call, and a rank's outcome.

Rules of this file: it has only data, which is pickled between a launcher and its own workers.
Importing it loads neither pytest nor torch. Fields that only pytest fills (fixtures, patches and
style) are empty without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

MADE = (
    "rank world_size device group capsys capsysbinary capfd capfdbinary caplog recwarn monkeypatch record_property"
).split()
"""Arguments of a test that each rank makes, and that are not sent to it."""


@frozen
class Patch:
    """Change by ``monkeypatch`` in pytest's process, which ranks repeat."""

    owner: Any
    """Module or class."""
    name: str
    """Name of the attribute; with *is_item*, of the attribute that holds the mapping."""
    key: Any = None
    is_item: bool = False
    value: Any = None
    is_gone: bool = False
    """True if the attribute or item was deleted."""


@frozen
class MadeUp:
    """Module that a test has made, as the value of a `Patch`."""

    name: str
    values: Mapping[str, Any]


@frozen
class Style:
    """Format of failures: pytest's options of these names."""

    tbstyle: str = "auto"
    showlocals: bool = False
    fulltrace: bool = False
    verbosity: int = 0
    directory: str = ""
    """Directory in which pytest was started; paths outside it are shown in full."""


@frozen
class RankCall:
    """One test, or one call of the fixture ``elastic``, for all ranks."""

    test: str
    """Node id of the test."""
    file: str
    line: int
    """First line of its function, from 1 on."""
    seed: int
    """Seed of rank 0; rank n has this seed plus n."""
    until: float = 0.0
    """Deadline on the machine's monotonic clock; 0 if ranks report no collectives before it."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    made: tuple[str, ...] = ()
    """Arguments from `MADE` that each rank makes."""
    style: Style = Style()
    patches: tuple[Patch, ...] = ()
    filters: tuple[Any, ...] = ()
    """``warnings.filters`` of the test."""
    levels: Mapping[str, int] = field(factory=dict)
    """Levels of the root logger (empty name) and of the loggers that have their own."""
    modes: Mapping[str, Any] = field(factory=dict)
    """Modes of torch (`_torch_modes`) in pytest's process."""
    config: Mapping[tuple[str, str], Any] = field(factory=dict)
    """Values set in torch's configuration modules (`_config_modules`) in pytest's process."""
    log_disabled: int = 0
    log_format: tuple[str, str] = ("", "")
    """Formats of messages and of dates in the report of a failure."""
    debug: bool = False
    """True if the user may debug a failure afterwards."""
    is_body: bool = False
    """True if the function is the body of a test, which must run to its end."""
    trace: bool = False
    """True if rank 0 enters a debugger at the first line."""
    example: bool | None = None
    """True for the example of Hypothesis that is reported, False for others; None without one."""
    checks: bool = True
    """True if the rank checks for state that the test leaves behind."""
    has_own_group: bool = False
    """True if the process group is made for this call alone."""
    shares_group: bool = False
    """True if other tests use the same process group."""
    coverage: bytes = b""
    """Settings of coverage.py, pickled; empty if coverage is not measured."""
    context: str = ""
    """Coverage's dynamic context."""


@frozen
class Failure:
    """Exception that a rank's function has raised."""

    error: bytes
    """Pickled exception."""
    kind: str
    message: str
    """Class and text, as in the last line of a traceback."""
    file: str
    line: int
    """Innermost line of user code that raised it."""
    representation: Any
    """Pytest's representation of the traceback (an ``ExceptionChainRepr``), or text."""
    is_secondary: bool
    """True if it only says that the connection to a peer was lost."""


@frozen
class Unhandled:
    """Exception that no code could handle: it ended a thread, or a finalizer raised it."""

    is_of_thread: bool
    where: str
    """Thread or finalizer, as the interpreter names it."""
    trace: str


@frozen
class RankOutcome:
    """Outcome of a call on one rank."""

    kind: str
    """``passed``, ``failed``, ``skipped`` or ``xfailed``."""
    value: bytes = b""
    """Return value of the function, pickled."""
    failure: Failure | None = None
    parts: tuple[tuple[Any, Failure], ...] = ()
    """Failed parts of the test, each with its identity and failure; see `PartsError`."""
    reason: str = ""
    """Reason for a skip or an expected failure."""
    place: tuple[str, int] = ("", 0)
    """File and line of the skip or expected failure."""
    warnings: tuple[Any, ...] = ()
    """(message, class, file, line) of each warning."""
    unhandled: tuple[Unhandled, ...] = ()
    records: tuple[Any, ...] = ()
    """Log records, as dictionaries."""
    log: str = ""
    """Log records as text, in pytest's format."""
    properties: tuple[tuple[str, object], ...] = ()
    """Properties of the fixture ``record_property``."""
    collectives: int = 0
    """Number of collectives that the rank has called in a shared process group."""
    leaks: tuple[str, ...] = ()
    """Descriptions of the state that the test has left behind in this worker."""
    coverage: bytes = b""
