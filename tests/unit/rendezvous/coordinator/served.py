"""A coordinator's server at work on a store in which everything is done at once, without a thread or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from attrs import Factory, define, field

from elasticlib.rendezvous.coordinator._server import REFUSALS, Server
from elasticlib.rendezvous.coordinator._server_events import (
    Action,
    Arrived,
    Event,
    HeartbeatsFetched,
    Interrupt,
    Load,
    Loaded,
    Purge,
    Save,
    ServerStopped,
    Unsaved,
)
from elasticlib.rendezvous.coordinator._state import JobState, Rules
from elasticlib.rendezvous.protocol._exchange import Posted, key_place, mailbox_key, mailbox_name, report_place
from elasticlib.rendezvous.protocol._messages import Descriptor, Envelope, Join, Message, Report, decode, encode
from elasticlib.rendezvous.protocol._operations import Delete, Discard, Log, Read, Receive, Write
from elasticlib.rendezvous.protocol._progress import Seen


@define
class Served:
    """A store, and the server that coordinates the job in it, once there is one."""

    rules: Rules
    key: bytes | None = None
    journaled: bool = True
    now: float = 100.0
    values: dict[str, bytes] = Factory(dict)
    saved: bytes | None = None
    """The document."""
    saves: list[bytes] = Factory(list)
    """All that was ever saved."""
    most: int = 10**9
    """Bytes of the document that the store takes."""
    refuse: int = 0
    """So many documents more are refused, whatever their size."""
    logs: list[str] = Factory(list)
    stopped: bool = False
    envelopes: Counter[str] = Factory(Counter)
    server: Any = None
    wait: float | None = field(default=None, init=False)
    """Seconds that the server waits for messages."""
    posted: int = field(default=0, init=False)

    def begin_term(self, nonce: str = "nonce", seen: Seen | None = None, **others: Any) -> Any:
        """A new term of office, of another node."""
        facts = {"run_id": "job", "key": self.key} | others
        state = JobState(self.rules)
        server = Server(facts["run_id"], "host", facts["key"], nonce, state, self.journaled, seen=seen or Seen())
        self.server, actions = server.begin(self.now)
        self._do(actions)
        return self

    def handle(self, event: Event) -> None:
        self.server, actions = self.server.step(event, self.now)
        self._do(actions)

    def send(self, *reports: Report) -> str:
        """All come at once; the mailbox that the last one opens, if it is a Join."""
        entries, mailbox = [], ""
        for report in reports:
            self.envelopes[report.node] += 1
            self.posted += 1
            seq = self.envelopes[report.node]
            place = report_place("job", self.server.nonce, report.node, seq)
            entries.append(Posted(self.posted, encode(Envelope(seq, report), self.key, place)))
            mailbox = mailbox_name(report.node, seq)
        self.handle(Arrived(entries))
        return mailbox

    def join(self, node: str, **others: Any) -> str:
        return self.send(Join(node, Descriptor(1, "trainer", ("10.0.0.1",), 4000), **others))

    def find(self, key: str, nonce: str | None = None) -> Message | None:
        data = self.values.get(key)
        place = key_place("job", self.server.nonce if nonce is None else nonce, key)
        return None if data is None else decode(data, self.key, place)

    def notice(self, mailbox: str, index: int) -> Any:
        return self.find(mailbox_key(mailbox, index))

    def _found(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def _do(self, actions: Sequence[Action]) -> None:
        for index, action in enumerate(actions):
            match action:
                case Load():
                    self.handle(Loaded(self.saved))
                case Save(data) if len(data) > self.most or self.refuse > 0:
                    self.refuse -= 1
                    assert self.server.refused < REFUSALS
                    self.handle(Unsaved("too large", actions[index + 1 :]))
                    return
                case Save(data):
                    self.saved = data
                    self.saves.append(data)
                case Write(values):
                    self.values.update(values)
                case Delete(keys):
                    for key in keys:
                        self.values.pop(key, None)
                case Read(keys):
                    self.handle(HeartbeatsFetched(self._found(keys)))
                case Receive(timeout):
                    self.wait = timeout
                case ServerStopped():
                    self.stopped = True
                case Log(_, text):
                    self.logs.append(text)
                case Discard() | Interrupt() | Purge():
                    pass
                case _:
                    raise AssertionError(action)
