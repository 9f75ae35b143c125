"""
Fault plans: failures to inject, and their times, as data.

Rules of this file: a fault is a small frozen class. Its repr is the code that makes it, and it can
be sent as JSON. It describes what happens, never how a simulator or a test with real processes
does it. Nodes are numbered from 0; times are seconds from the start of the job.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, get_args

from attrs import NOTHING, Attribute, asdict, field, fields, frozen

from elasticlib._rules import is_index, is_number, is_time
from elasticlib.errors import ConfigError

VERSION = 1
PARTS = ("machine", "agent", "rendezvous", "spawner")
KILLED = (*PARTS, "node")
"""Parts of a node that a fault can affect: the whole machine, or one of its processes."""
PLACES = ("hello", "pulse", "beat", "box", "inbox", "counter", "state", "leader", "all")
"""Keys of the job's store that a fault can tamper with; *all* means that it deletes every key."""


def _must_be(holds: Callable[[Any], bool], rule: str) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(owner: Any, attribute: Attribute[Any], value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"{type(owner).__name__}.{attribute.name}={value!r:.80}: give {rule}")

    return check


def _is_finite(value: object) -> bool:
    return is_number(value) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(map(repr, values))


_moment = _must_be(is_time, "a number of seconds, 0 or more")
_offset = _must_be(_is_finite, "a number of seconds, below 0 for a clock that is behind")
_drift = _must_be(lambda value: _is_finite(value) and value >= -0.1, "seconds gained in each second, -0.1 or more")
_period = _must_be(lambda value: _is_finite(value) and value >= 0.001, "a number of seconds, 0.001 or more")
_node = _must_be(is_index, "the number of a node, 0 for the first")
_number = _must_be(lambda value: _is_whole(value) and value >= 1, "a whole number, 1 or more")
_length = _must_be(is_index, "a number of characters, 0 or more")
_seed = _must_be(_is_whole, "a whole number")
_yes_or_no = _must_be(lambda value: isinstance(value, bool), "True or False")
_part = _must_be(lambda value: value in PARTS, f"one of {_listed(PARTS)}")
_killed = _must_be(lambda value: value in KILLED, f"one of {_listed(KILLED)}")
_places = _must_be(lambda value: all(each in PLACES for each in value), f"some of {_listed(PLACES)}")
_acts = _must_be(lambda value: all(map(is_index, value)), "numbers of acts, 0 for the first")


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


class _Printed:
    """Base class whose repr is the shortest code that makes the object."""

    def __repr__(self) -> str:
        parts = []
        for each in fields(type(self)):  # type: ignore[arg-type]  # every fault is an attrs class
            value = getattr(self, each.name)
            if each.default is NOTHING:
                parts.append(repr(value))
            elif value != each.default:
                parts.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


@frozen(repr=False)
class _NodeFault(_Printed):
    node: int = field(validator=_node)
    at: float = field(validator=_moment)


@frozen(repr=False)
class _LastingNodeFault(_NodeFault):
    seconds: float = field(validator=_moment)


@frozen(repr=False)
class Kill(_NodeFault):
    """
    SIGKILL to one process of the node, or to all of them (``node``), or the loss of the whole
    machine, which then stops answering.
    """

    what: str = field(default="machine", validator=_killed)


@frozen(repr=False)
class Pause(_LastingNodeFault):
    """SIGSTOP to one or all processes of the machine, workers included; SIGCONT after *seconds*."""

    what: str = field(default="machine", validator=_part)


@frozen(repr=False)
class Suspend(_LastingNodeFault):
    """Sleep of the machine for *seconds*: its processes and its clocks stop."""


@frozen(repr=False)
class Cut(_LastingNodeFault):
    """Loss of the machine's network for *seconds*: nothing arrives, and nothing is refused."""


@frozen(repr=False)
class Break(_NodeFault):
    """Reset of every connection of the machine: an unknown part of the data in flight is lost."""


@frozen(repr=False)
class Slow(_LastingNodeFault):
    """Delay of *delay* seconds for all that the machine sends and receives, for *seconds*."""

    delay: float = field(default=0.5, validator=_moment)


@frozen(repr=False)
class FailWorker(_NodeFault):
    """
    Failure of *workers* workers of the node, if any run; *secondary*: each has lost its peer.

    If all workers of the node that hosts the workers' store have succeeded, the store is lost
    instead.

    Each worker fails with a message and a traceback of *text* characters (0: a short message).
    """

    secondary: bool = field(default=False, validator=_yes_or_no)
    workers: int = field(default=1, validator=_number)
    text: int = field(default=0, validator=_length)


@frozen(repr=False)
class Stubborn(_LastingNodeFault):
    """Workers of the node that, from *at* on, run for *seconds* after SIGTERM."""


@frozen(repr=False)
class Leave(_NodeFault):
    """SIGTERM from the operator to the node's agent."""


@frozen(repr=False)
class Join(_NodeFault):
    """Start of another agent on the node's machine, which is switched on if necessary."""


@frozen(repr=False)
class Flap(_LastingNodeFault):
    """
    Repeated loss of the node for *seconds*.

    Its agent exits as soon as it has workers, or fails before. In each case its scheduler starts
    another agent *after* seconds later.
    """

    after: float = field(default=1.0, validator=_moment)


@frozen(repr=False)
class Skew(_Printed):
    """Clocks of the machine that start *seconds* ahead and gain *drift* seconds each second."""

    node: int = field(validator=_node)
    seconds: float = field(validator=_offset)
    drift: float = field(default=0.0, validator=_drift)

    @property
    def at(self) -> float:
        """Time of the fault: 0, because a skew begins with the job."""
        return 0.0


@frozen(repr=False)
class PauseStore(_Printed):
    """Silence of a store outside the job's nodes for *seconds*."""

    at: float = field(validator=_moment)
    seconds: float = field(validator=_moment)


@frozen(repr=False)
class DeleteLeader(_Printed):
    """Deletion of the key that names the coordinating node, in a store outside the job's nodes."""

    at: float = field(validator=_moment)


@frozen(repr=False)
class SetBack(_Printed):
    """Rollback by *seconds* of the coordinator's state in a store outside the job's nodes."""

    at: float = field(validator=_moment)
    seconds: float = field(validator=_moment)


@frozen(repr=False)
class Replay(_LastingNodeFault):
    """Repeated writing, for *seconds*, of the last two heartbeats of each agent of the node."""


@frozen(repr=False)
class Tamper(_Printed):
    """
    Changes to the store by an adversary without the token, *every* so many seconds, for *seconds*.

    The adversary knows every value that was ever written. It writes old values again, at their key
    or at another one; it changes, invents, deletes and swaps values. *where* names keys of `PLACES`
    (empty: each but *all*). The *seed* determines the acts. *acts* restricts them by number (empty:
    all of them).
    """

    at: float = field(validator=_moment)
    seconds: float = field(validator=_moment)
    seed: int = field(default=0, validator=_seed)
    every: float = field(default=0.25, validator=_period)
    where: tuple[str, ...] = field(default=(), converter=_several, validator=_places)
    acts: tuple[int, ...] = field(default=(), converter=_several, validator=_acts)


Fault: TypeAlias = (
    Kill | Pause | Suspend | Cut | Break | Slow | FailWorker | Stubborn | Leave | Join | Flap | Skew | PauseStore
    | DeleteLeader | SetBack | Replay | Tamper
)  # fmt: skip

KINDS: tuple[type[Any], ...] = get_args(Fault)
_BY_NAME = {kind.__name__: kind for kind in KINDS}


def _as_tuple(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    try:
        return tuple(faults)
    except TypeError:
        raise ConfigError(f"FaultPlan.faults={faults!r:.80}: give a list of faults, even for a single fault") from None


@frozen(repr=False)
class FaultPlan(_Printed):
    """Faults in any order; faults with the same time happen in the order of this sequence."""

    faults: tuple[Fault, ...] = field(converter=_as_tuple)

    @faults.validator
    def _are_faults(self, _: object, value: tuple[Any, ...]) -> None:
        for each in value:
            if not isinstance(each, KINDS):
                raise ConfigError(f"{each!r:.80} is not a fault: give {', '.join(_BY_NAME)}")

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)

    @property
    def last(self) -> float:
        """End of the last fault, in seconds from the start of the job."""
        return max(map(_end_of, self), default=0.0)

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` makes an equal plan from it."""
        faults = [{"fault": type(each).__name__, **asdict(each)} for each in self]
        return json.dumps({"v": VERSION, "faults": faults}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> FaultPlan:
        """Return the plan in *text*. Raises `ConfigError` if it contains none."""
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or body.get("v") != VERSION or not isinstance(body.get("faults"), list):
                raise ValueError(f"it is not a plan of version {VERSION}")
            return cls(_fault(each) for each in body["faults"])
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"a fault plan cannot be read from {text[:80]!r}: {error}") from error


def _fault(body: Any) -> Fault:
    if not isinstance(body, dict) or str(body.get("fault")) not in _BY_NAME:
        raise ValueError(f"{body!r:.80} is not a fault")
    kind = _BY_NAME[body["fault"]]
    given = {name: value for name, value in body.items() if name != "fault"}
    _check_fields(kind, given)
    made: Fault = kind(**given)
    return made


def _check_fields(kind: Any, given: Mapping[str, Any]) -> None:
    known = {each.name: each.default for each in fields(kind)}
    needed = {name for name, default in known.items() if default is NOTHING}
    if not needed <= given.keys() <= known.keys():
        raise ValueError(
            f"{kind.__name__} has a missing or unknown field: its fields are {', '.join(known)}; required: "
            f"{', '.join(sorted(needed))}"
        )


def _end_of(fault: Fault) -> float:
    """Return the end of *fault*, in seconds from the start of the job."""
    at: float = getattr(fault, "at", 0.0)
    # The seconds of these faults say how far a clock or a state is off, or how long a worker takes to end.
    lasts = not isinstance(fault, (Skew, Stubborn, SetBack))
    return at + (getattr(fault, "seconds", 0.0) if lasts else 0.0)
