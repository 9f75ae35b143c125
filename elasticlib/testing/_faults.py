"""
What goes wrong, and when: plans of faults, as data.

Rules of this file: a fault is a small frozen class that prints as the code that makes it and travels as JSON; it
says what happens, never how a simulator or a test with real processes brings it about. Nodes are numbered from 0;
times are seconds from the start of the job.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, get_args

from attrs import NOTHING, Attribute, asdict, field, fields, frozen

from elasticlib.errors import ConfigError

VERSION = 1
PARTS = ("machine", "agent", "rendezvous", "spawner")
"""What of a node a fault can hit: all of it, the agent alone, or its sidecar alone."""
PLACES = ("hello", "pulse", "beat", "box", "inbox", "counter", "state", "leader", "all")
"""Where in the store somebody can tamper with what the job has there; *all* of it can be deleted."""


def _must_be(holds: Callable[[Any], bool], rule: str) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(owner: Any, attribute: Attribute[Any], value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"{type(owner).__name__}.{attribute.name}={value!r:.80}: give {rule}")

    return check


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(map(repr, values))


_moment = _must_be(lambda value: _is_number(value) and value >= 0, "a number of seconds, 0 or more")
_offset = _must_be(_is_number, "a number of seconds, below 0 for a clock that is behind")
_drift = _must_be(lambda value: _is_number(value) and value >= -0.1, "seconds gained in each second, -0.1 or more")
_period = _must_be(lambda value: _is_number(value) and value >= 0.001, "a number of seconds, 0.001 or more")
_node = _must_be(lambda value: _is_whole(value) and value >= 0, "the number of a node, 0 for the first")
_number = _must_be(lambda value: _is_whole(value) and value >= 1, "a whole number, 1 or more")
_length = _must_be(lambda value: _is_whole(value) and value >= 0, "a number of characters, 0 or more")
_seed = _must_be(_is_whole, "a whole number")
_yes_or_no = _must_be(lambda value: isinstance(value, bool), "True or False")
_part = _must_be(lambda value: value in PARTS, f"one of {_listed(PARTS)}")
_places = _must_be(lambda value: all(each in PLACES for each in value), f"some of {_listed(PLACES)}")
_acts = _must_be(lambda value: all(_is_whole(each) and each >= 0 for each in value), "numbers of acts, 0 for the first")


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


class _Printed:
    """Prints as the shortest code that makes it."""

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
    """SIGKILL: to the whole machine (nothing of it answers any more), or to one process on it."""

    what: str = field(default="machine", validator=_part)


@frozen(repr=False)
class Pause(_LastingNodeFault):
    """SIGSTOP, and SIGCONT after *seconds*: all processes of the machine, workers included, or one of them."""

    what: str = field(default="machine", validator=_part)


@frozen(repr=False)
class Suspend(_LastingNodeFault):
    """The machine sleeps for *seconds* and knows nothing of it: its processes stand still, its clocks with them."""


@frozen(repr=False)
class Cut(_LastingNodeFault):
    """The machine's link is down for *seconds*: nothing is refused, nothing arrives."""


@frozen(repr=False)
class Break(_NodeFault):
    """Every connection of the machine is reset: what was on its way is lost, and nobody knows how much of it."""


@frozen(repr=False)
class Slow(_LastingNodeFault):
    """For *seconds* everything that the machine sends or gets takes *delay* seconds more."""

    delay: float = field(default=0.5, validator=_moment)


@frozen(repr=False)
class FailWorker(_NodeFault):
    """
    A worker of the node fails, if one runs; *secondary*: as one does that lost its peer.

    On the node that hosts the workers' store that store is lost instead, once all workers there have ended well.

    So many *workers* fail at once, each with a message and a traceback of *text* characters (0: a short message).
    """

    secondary: bool = field(default=False, validator=_yes_or_no)
    workers: int = field(default=1, validator=_number)
    text: int = field(default=0, validator=_length)


@frozen(repr=False)
class Stubborn(_LastingNodeFault):
    """From *at* on the node's workers go on for *seconds* after SIGTERM."""


@frozen(repr=False)
class Leave(_NodeFault):
    """The operator stops the node's agent by SIGTERM."""


@frozen(repr=False)
class Join(_NodeFault):
    """Another agent is started on the node's machine, which is switched on if it is not."""


@frozen(repr=False)
class Flap(_LastingNodeFault):
    """
    For *seconds* the node comes and goes: its agent ends itself as soon as it has workers, whatever keeps it from its
    work, and its scheduler starts another one *after* seconds later, however it ended.
    """

    after: float = field(default=1.0, validator=_moment)


@frozen(repr=False)
class Skew(_Printed):
    """From the start the machine's clocks are *seconds* ahead, and gain *drift* seconds each second."""

    node: int = field(validator=_node)
    seconds: float = field(validator=_offset)
    drift: float = field(default=0.0, validator=_drift)

    @property
    def at(self) -> float:
        """A skew is there from the start."""
        return 0.0


@frozen(repr=False)
class PauseStore(_Printed):
    """A store that is on no node of the job answers nobody for *seconds*."""

    at: float = field(validator=_moment)
    seconds: float = field(validator=_moment)


@frozen(repr=False)
class DeleteLeader(_Printed):
    """Somebody deletes the key that says which node coordinates, in a store that is on no node of the job."""

    at: float = field(validator=_moment)


@frozen(repr=False)
class SetBack(_Printed):
    """Somebody puts back what the coordinator had written down *seconds* before, in a store that is on no node."""

    at: float = field(validator=_moment)
    seconds: float = field(validator=_moment)


@frozen(repr=False)
class Replay(_LastingNodeFault):
    """For *seconds* a stranger writes the last two heartbeats of each agent of the node again and again, in turn."""


@frozen(repr=False)
class Tamper(_Printed):
    """
    For *seconds* an adversary without the token does, *every* so many seconds, something to what lies in the store.

    He has read all that was ever written, and writes it again, there or elsewhere, changes it, makes something up,
    deletes and swaps: at some of `PLACES`, or at any but *all*. What he does follows from the *seed*; of his acts
    only those that are named are done, if any are.
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
        raise ConfigError(f"FaultPlan.faults={faults!r:.80}: give a list of faults, also of one") from None


@frozen(repr=False)
class FaultPlan(_Printed):
    """Faults in any order; those of the same moment happen in the order in which they stand here."""

    faults: tuple[Fault, ...] = field(converter=_as_tuple)

    @faults.validator
    def _are_faults(self, _: object, value: tuple[Any, ...]) -> None:
        for each in value:
            if not isinstance(each, KINDS):
                raise ConfigError(f"{each!r:.80} is no fault: give {', '.join(_BY_NAME)}")

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)

    @property
    def last(self) -> float:
        """When the last fault is over."""
        lasting = (each for each in self if not isinstance(each, (Skew, Stubborn, SetBack)))
        return max((each.at + getattr(each, "seconds", 0.0) for each in lasting), default=0.0)

    def to_json(self) -> str:
        """As JSON; `from_json` makes an equal plan of it."""
        faults = [{"fault": type(each).__name__, **asdict(each)} for each in self]
        return json.dumps({"v": VERSION, "faults": faults}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> FaultPlan:
        """The plan that *text* holds; raises `ConfigError` for anything else."""
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or body.get("v") != VERSION or not isinstance(body.get("faults"), list):
                raise ValueError(f"it is no plan of version {VERSION}")
            return cls(_fault(each) for each in body["faults"])
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"no fault plan can be read from {text[:80]!r}: {error}") from error


def _fault(body: Any) -> Fault:
    if not isinstance(body, dict) or str(body.get("fault")) not in _BY_NAME:
        raise ValueError(f"{body!r:.80} is no fault")
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
            f"{kind.__name__} has the fields {', '.join(known)}, of which {', '.join(sorted(needed))} must be given"
        )
