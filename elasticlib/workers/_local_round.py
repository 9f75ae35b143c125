"""
One round's workers on this machine, as the events of their spawner report them.

Rules of this file: it starts, signals and waits for nothing. Ranks are local ones, except in
failures and return values, which get *rank_base* added.
"""

from __future__ import annotations

from typing import Any

from attrs import Factory, define

from elasticlib._clock import wall_time
from elasticlib.errors import ProcessFailure, StartError
from elasticlib.processes import room_for_descriptors
from elasticlib.spec import LogsDest
from elasticlib.workers import _failure, _launch_events as heard, _machine


@define(eq=False)
class LocalRound:
    """
    The *count* workers of a round.

    Each of them runs, or is in `exits`. One whose program has failed is in `failed` too, before
    its process ends. All are gone once the spawner says so, or is lost itself; then no more events
    come.
    """

    count: int
    dest: LogsDest = Factory(LogsDest)
    rank_base: int = 0
    world_size: int = 0
    has_store: bool = False
    """True if this node got the socket of the round's store."""
    memory_kills: int = 0
    """Number of out-of-memory kills in this cgroup before the round."""
    pids: dict[int, int] = Factory(dict)
    exits: dict[int, heard.Exit] = Factory(dict)
    failed: dict[int, heard.Exit] = Factory(dict)
    """Facts on workers whose programs failed."""
    noticed: dict[int, float] = Factory(dict)
    """Unix time at which the end or failure of a worker was noticed."""
    is_stopped: bool = False
    """True if the spawner has reported that no process is left."""
    lost: heard.SpawnerLost | None = None
    """The reason why all workers are gone at once."""
    store: heard.RoundStoreEnded | None = None
    """The end of the round's store."""
    store_gone_at: float = 0.0

    def note(self, event: heard.Event) -> None:
        """Note an *event* of this round, if it concerns the ends of its workers."""
        match event:
            case heard.Exit():
                self.exits[event.local_rank] = event
                self.noticed.setdefault(event.local_rank, wall_time())
            case heard.ProgramFailed(end):
                self.failed[end.local_rank] = end
                self.noticed[end.local_rank] = wall_time()
            case heard.AllStopped():
                self.is_stopped = True
            case heard.RoundStoreEnded():
                if self.store is None:
                    self.store = event
                self.store_gone_at = wall_time()
            case heard.SpawnerLost():
                # The first loss is the reason of the later ones.
                if self.lost is None:
                    self.lost = event

    def running(self) -> dict[int, int]:
        """Return the process ids of the workers that have not ended, by local rank."""
        return {rank: pid for rank, pid in self.pids.items() if rank not in self.exits}

    def ends(self) -> dict[int, heard.Exit]:
        """Return the present or coming ends of workers, by what is known now."""
        return {**self.failed, **self.exits}

    def gone(self) -> bool:
        """Return True if no worker, nor a process that one started, is left."""
        return self.is_stopped or self.lost is not None

    def any_failed(self) -> bool:
        """Return True if a worker has failed, or all have lost their common store."""
        has_lost_store = self.store is not None and self.store.was_needed
        return has_lost_store or any(end.exitcode != 0 for end in self.ends().values())

    def all_succeeded(self) -> bool:
        """Return True if all workers have ended well, and no process that they started is left."""
        have_all_ended = len(self.exits) == self.count
        return have_all_ended and not self.any_failed() and self.gone()

    def serves_others(self) -> bool:
        """
        Return True if this node has the store of this round, and workers of other nodes use it
        too.
        """
        return self.has_store and self.world_size > self.count

    def hosts_for_others(self) -> bool:
        """Return True if workers of other nodes use the store of this node, which lives."""
        return self.serves_others() and not self._store_is_gone()

    def lost_store_of_others(self) -> bool:
        """
        Return True if workers of other nodes lost the store after all workers here had ended
        well.
        """
        return self._store_is_gone() and self.serves_others() and self.all_succeeded()

    def _store_is_gone(self) -> bool:
        """Return True if the store's process ended, or the spawner that hosts it."""
        return self.store is not None or self.lost is not None

    # Results of the workers.

    def failures(self, rank_base: int = 0, *, by_loss: bool = True) -> dict[int, ProcessFailure]:
        """
        Return the failures of the workers that failed on their own, by local rank plus
        *rank_base*.

        If all were lost at once, and none had failed before, that failed them all, unless
        *by_loss* is False.
        """
        with room_for_descriptors(1):
            kills = _machine.memory_kills() - self.memory_kills
            found = _failure.failures_of(self.ends(), self.dest, kills, self.noticed, rank_base)

        if not found and self.lost is not None and by_loss:
            # If all had ended well, the spawner alone was lost.
            lost = 1 if self.all_succeeded() else self.count
            found = _failure.lost_all(lost, rank_base, self.pids, self.lost.why)

        store = self._missed_store()
        if store is None:
            return found

        blamed = _failure.blamed(self.ends(), self.count)
        if blamed is not None:
            found[rank_base + blamed] = _failure.lost_store(store, blamed, rank_base, kills, self.store_gone_at)
        return found

    def _missed_store(self) -> heard.RoundStoreEnded | None:
        """Return the end of the round's store, if workers of this node or of others needed it."""
        store = self.store
        if store is None:
            return None
        was_needed = store.was_needed or self.lost_store_of_others()
        return store if was_needed else None

    def cut_short(self) -> dict[int, ProcessFailure]:
        """Return the failures of workers that a stop ended, or that were not seen to end, by local rank."""
        return _failure.cut_short(self.exits, self.pids, self.count)

    def original_exception(self, rank: int) -> BaseException | None:
        """Return the exception that ended worker *rank*, if it can be rebuilt; else None."""
        store = self._missed_store()
        if store is not None and rank == _failure.blamed(self.ends(), self.count):
            return StartError(store.why)
        end = self.ends().get(rank)
        if end is not None:
            return _failure.original_exception(end)
        return None if self.lost is None else self.lost.cause

    def return_values(self, rank_base: int = 0) -> dict[int, Any]:
        """Return the workers' return values, by local rank plus *rank_base*; None from programs."""
        return _failure.return_values(self.exits, self.count, rank_base)
