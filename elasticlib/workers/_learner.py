"""
What one launch learns of its workers' imports, and when its fork server is asked to do them ahead.

Rules of this file: it decides and asks, and waits for nothing; a launch goes on as before whatever becomes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from attrs import evolve

from elasticlib import records
from elasticlib.errors import StartError
from elasticlib.workers import _profile
from elasticlib.workers._fork_servers import ForkServer
from elasticlib.workers._launch_events import Imported
from elasticlib.workers._profile import Profile
from elasticlib.workers.child._import_notes import BY_CHANCE

_LOOK = 0.5
"""Seconds between looks whether a copy of the fork server is done with its imports."""
_WORTH = 50
"""Milliseconds of imports for which a copy of the fork server is made."""


class Learner:
    """Has the fork server of a launch import what its workers import."""

    def __init__(
        self, entry: str, profile: Profile, environment: Mapping[str, str], own: Sequence[str], sink: records.Sink
    ) -> None:
        self._environment = environment
        self._entry = entry
        self._own = own
        """Variables that each worker has for itself."""
        self._sink = sink
        self._profile = profile
        self._fork_server: ForkServer | None = None
        self._order = 0
        """The last one that was ours, until its outcome is known."""

    def employ(self, fork_server: ForkServer) -> bool:
        """A spawner is about to come from *fork server*: whether it had better wait for the copy."""
        self._fork_server = fork_server
        if self._profile.imports and not fork_server.learning():
            self._ask(paced=False)
        return bool(self._profile.imports)

    def heard(self, imported: Imported) -> None:
        """The workers have imported something."""
        before = self._profile
        self._profile = before.after(imported.imports, imported.whole)
        if self._profile != before:
            self._save()
            self._ask(paced=True)

    def poll(self) -> None:
        """See whether the copy is done."""
        there = self._fork_server
        if not self._order or there is None or there.listen() is not None:
            return
        mine = self._order == there.ordered
        if mine and not there.refused.keys() <= self._profile.refused.keys():
            # At once: who comes next need not find out again.
            self._profile = evolve(self._profile, refused={**self._profile.refused, **there.refused})
            self._save()
        if there.learning():
            return
        self._order = 0
        if mine and there.copy:
            why = {name: str(reason) for name, (reason, _) in there.refused.items()}
            self._sink(records.ImportsLearned(tuple(sorted(there.names)), why))

    def _save(self) -> None:
        # What may have been bad luck, such as too little memory, is tried again in the next program.
        lasting = {name: body for name, body in self._profile.refused.items() if body[0] not in BY_CHANCE}
        _profile.save(self._entry, evolve(self._profile, refused=lasting))

    def poll_timeout(self) -> float | None:
        """Seconds until `poll` wants to be called; None: not at all."""
        return _LOOK if self._order else None

    def _ask(self, paced: bool) -> None:
        """Have the fork server make a copy with all that is wanted, unless there is one."""
        there = self._fork_server
        if there is None or there.listen() is not None:
            return
        fits = there.copy_for(self._environment) != "none" or there.is_asked_for(self._environment)
        known = {each.name: each for each in there.wanted} if fits else {}
        wanted = self._profile.wanted()
        new = [each for each in wanted if each.name not in known or not each.changed <= known[each.name].changed]
        if sum(each.cost for each in new if each.name not in there.key.preload) >= _WORTH:
            both = {**known, **{each.name: each for each in wanted}}
            with contextlib.suppress(StartError):  # who launches next will hear of it
                there.learn(list(both.values()), self._environment, self._own, paced)
                self._order = there.ordered
