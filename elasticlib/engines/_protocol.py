"""
The protocol of engines, which place one agent of a job on each of their machines. Pure.

An agent is the program `AgentCommand.argv`. It reads frames on its standard input and writes frames on its standard
output (`_agent_frames`). An engine starts it, carries the bytes, and reports what happens to it as events.

Rules for an engine:

* It decides nothing: `Supervisor` says which place gets another agent, and when the job is over.
* The agents of a place are counted: the first has the number 0, and each `Placement.replace` adds one. An event has
  the number of its agent.
* Each agent that was started or could not be started ends with one `AgentLost`, also after its result.
* The end of an agent's standard input ends the agent and its workers. An engine whose client can vanish without that
  (a cut link) must see to it that the agent ends too.
* One thread calls `Placement.next_event`, and another one all other methods. Only `next_event` waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from attrs import field, frozen

from elasticlib.spec import LaunchConfig


@frozen
class AgentCommand:
    """The program that an engine starts on each machine, the same for all places."""

    argv: tuple[str, ...]
    """
    Arguments behind the interpreter, such as ``-m elasticlib.remote._node``. An engine may add options of the agent:
    ``--address HOST``, ``--workers NUMBER`` (for ``nproc_per_node="auto"``) and ``--lease SECONDS``.
    """
    payload: bytes = field(repr=False)
    """Frames for the standard input of each agent, first of all."""
    environment: Mapping[str, str] = field(factory=dict)
    """Variables for the agent, in addition to those of its machine."""


@frozen
class AgentUp:
    """An agent runs, and has listed its machine's *address* and a free port there as ``host:port``."""

    place: int
    address: str
    agent: int = 0
    """Number of agents that this place had before."""


@frozen
class AgentLost:
    """An agent has ended or is out of reach, or could not be started; *why* names the machine and the reason."""

    place: int
    why: str
    agent: int = 0


@frozen
class AgentOutput:
    """Output of the workers of an agent: a byte for the stream (1 or 2), and the text."""

    place: int
    data: bytes
    agent: int = 0


@frozen
class AgentResult:
    """The outcome of an agent's node, which the agent has packed."""

    place: int
    data: bytes = field(repr=False)
    agent: int = 0


@frozen
class AgentReport:
    """A report of an agent about its workers, or its answer to a question of the client."""

    place: int
    data: bytes = field(repr=False)
    agent: int = 0
    is_answer: bool = False


@frozen
class EngineEnds:
    """The engine ends its agents soon, for the reason *why*: the call stops, with the usual time for its workers."""

    why: str


EngineEvent: TypeAlias = AgentUp | AgentLost | AgentOutput | AgentResult | AgentReport | EngineEnds


class Placement(Protocol):
    """The agents of one job, from `Engine.place` until `close`."""

    def next_event(self, timeout: float) -> EngineEvent | None:
        """Return the next event; None after *timeout* seconds without one."""

    def send(self, place: int, data: bytes) -> None:
        """Write *data* to the standard input of the agent at *place*. A lost agent gets nothing."""

    def replace(self, place: int) -> None:
        """End the agent at *place*, as far as it can be reached. Start another one, once there is a machine."""

    def stop(self) -> None:
        """End the standard input of all agents: they stop their workers and end."""

    def close(self) -> None:
        """End all agents at once, release everything, and end a wait in `next_event`; may be called twice."""


class Engine(Protocol):
    """A source of machines, such as `Ssh`."""

    @property
    def nodes(self) -> int:
        """Number of machines, with one agent each."""

    @property
    def endpoint(self) -> str:
        """Endpoint of a rendezvous outside the agents' machines, from `place` on; "" if one of them must host it."""

    @property
    def token(self) -> str:
        """Token that jobs need at `endpoint`; "" if it is not the engine's."""

    def place(self, agents: int, command: AgentCommand) -> Placement:
        """
        Start *command* on *agents* machines.

        Raises `ConfigError` or `StartError`, with nothing left, if that is impossible. A machine that cannot be
        reached is an `AgentLost`.
        """


class BatchEngine(Protocol):
    """A source of machines that runs a whole job later, such as `Slurm`: its nodes need no client meanwhile."""

    @property
    def nodes(self) -> int:
        """Number of machines, with one node of the job each."""

    def submit(self, title: str, call: bytes, config: LaunchConfig) -> Any:
        """
        Submit the packed *call* with this *title*.

        Raises `ConfigError` or `StartError`, with nothing left, if it is refused.
        """
