"""
What a test's own process and its ranks say to each other of it: the call, and what came of it on a rank.

Rules of this file: pure data, that is pickled between a launcher and its own workers; importing it loads neither pytest
nor torch. What only pytest has (its fixtures, patches and style) is empty without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

MADE = (
    "rank world_size device group capsys capsysbinary capfd capfdbinary caplog recwarn monkeypatch record_property"
).split()
"""Arguments of a test that are made in each rank, and do not travel."""


@frozen
class Patch:
    """A change that ``monkeypatch`` has made in pytest's process, to be made in a rank too."""

    owner: Any
    """A module or a class."""
    name: str
    """Of its attribute; with *is_item* of the attribute that holds the mapping."""
    key: Any = None
    is_item: bool = False
    value: Any = None
    is_gone: bool = False
    """It was deleted."""


@frozen
class MadeUp:
    """A module that a test has made, as the value of a `Patch`."""

    name: str
    values: Mapping[str, Any]


@frozen
class Style:
    """How failures are to be shown: pytest's options of these names."""

    tbstyle: str = "auto"
    showlocals: bool = False
    fulltrace: bool = False
    verbosity: int = 0
    directory: str = ""
    """Where pytest was started: elsewhere, paths are shown whole."""


@frozen
class RankCall:
    """One test, or one call of the fixture ``elastic``, for all ranks."""

    test: str
    """Its node id."""
    file: str
    line: int
    """Where its function begins, from 1 on."""
    seed: int
    """Of rank 0; each other one has the next."""
    until: float = 0.0
    """The test's limit, on the monotonic clock of the machine; 0 where nothing is told before it."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    made: tuple[str, ...] = ()
    """Arguments that each rank makes, of `MADE`."""
    style: Style = Style()
    patches: tuple[Patch, ...] = ()
    filters: tuple[Any, ...] = ()
    """``warnings.filters`` of the test."""
    levels: Mapping[str, int] = field(factory=dict)
    """Of the root logger (empty name) and of others that have one of their own."""
    modes: Mapping[str, Any] = field(factory=dict)
    """Modes of torch (`_torch_modes`) in pytest's process."""
    config: Mapping[tuple[str, str], Any] = field(factory=dict)
    """What is chosen in torch's configuration modules (`_config_modules`) in pytest's process."""
    log_disabled: int = 0
    log_format: tuple[str, str] = ("", "")
    """Of messages and dates in what is shown of a failure."""
    debug: bool = False
    """Whether a failure may be looked at in a debugger afterwards."""
    is_body: bool = False
    """Whether the function is the body of a test, which has to come to its end."""
    trace: bool = False
    """Whether rank 0 is in a debugger from the first line on."""
    example: bool | None = None
    """Of an example of Hypothesis: whether it is the one that is told of; None where it is none."""
    checks: bool = True
    """Whether what the test leaves behind is looked for."""
    has_own_group: bool = False
    """Whether the process group is made for this call alone."""
    shares_group: bool = False
    """Whether tests before and after it are in the same process group."""
    coverage: bytes = b""
    """Settings of coverage.py, pickled; empty where nothing is measured."""
    context: str = ""
    """Coverage's dynamic context."""


@frozen
class Failure:
    """An exception that a rank's function has raised."""

    error: bytes
    """Packed for the trip."""
    kind: str
    message: str
    """With the name of its class, as a traceback ends."""
    file: str
    line: int
    """Where it was raised in code of the user's own."""
    representation: Any
    """Pytest's of the traceback: an ``ExceptionChainRepr``, or text."""
    is_secondary: bool
    """It says no more than that the connection to a peer was lost."""


@frozen
class RankOutcome:
    """What came of a call on one rank."""

    kind: str
    """``passed``, ``failed``, ``skipped`` or ``xfailed``."""
    value: bytes = b""
    """What the function returned, packed."""
    failure: Failure | None = None
    parts: tuple[tuple[Any, Failure], ...] = ()
    """Where several parts of a test have failed, what each is, and how: see `PartsError`."""
    reason: str = ""
    """Of a skip or an expected failure."""
    place: tuple[str, int] = ("", 0)
    """Where that was said."""
    warnings: tuple[Any, ...] = ()
    """(message, class, file, line) of each."""
    records: tuple[Any, ...] = ()
    """Log records, as dictionaries."""
    log: str = ""
    """As pytest shows them."""
    properties: tuple[tuple[str, object], ...] = ()
    """Of the fixture ``record_property``."""
    collectives: int = 0
    """How many collectives it has called in a process group that tests share."""
    leaks: tuple[str, ...] = ()
    """What the test has left behind in this worker."""
    coverage: bytes = b""
