"""
Random generators of a forked worker: seeded by chance, as in a fresh program, unless their seed
was chosen.

A fork copies its parent's generators, so all ranks, restarts and launches would draw the same
numbers: the same dropout masks, shuffles and initial weights. The fork server notes which
generators its imports left without a chosen seed, and each worker seeds these again. A module
that seeds a generator at its import keeps that seed, as in a program of its own.

Rules of this file: generators are compared before and after the imports, and never replaced.
Accelerators are not touched: their generators are made, and seeded, when a worker first uses
them.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LEAST_ENTROPY = 2**64
"""A smaller number was chosen as a seed; numpy takes 128 bits from the system."""
_LEAST_SEED = 2**32
"""The same limit for torch, which takes 64 bits."""
_WORDS = 624
"""Numbers that Python's generator draws from one state before it makes the next."""
_MOST_STATES = 10_000

_chance: list[Callable[[], object]] = []
"""Functions that seed the generators again which the fork server's imports left unseeded."""
_chosen: list[Callable[[], object]] = []
"""Functions that restore generators which CPython itself seeds again in each forked process."""
_torch_seeds: list[int | None] = []


def _torch_seed() -> int | None:
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    return None if generator is None else int(generator.initial_seed())


@contextmanager
def noted() -> Iterator[None]:
    """
    Import modules in the block; afterwards `reseed` knows which of their generators were not
    seeded.
    """
    if "torch" in sys.modules:
        # A sitecustomize module may have imported it.
        note_torch()

    before = random.getstate()
    yield
    if _was_seeded(before):
        state = random.getstate()
        _chosen.append(lambda: random.setstate(state))

    if _torch_was_seeded_by_chance():
        _chance.append(_seed_torch)
    _chance.extend(_numpy_generators())


def _torch_was_seeded_by_chance() -> bool:
    """Return True if torch's generator has a seed that was not chosen."""
    seed = _torch_seed()
    if seed is None:
        return False
    if _torch_seeds:
        return seed in _torch_seeds
    # Torch was imported before its seed could be noted.
    return seed >= _LEAST_SEED


def note_torch() -> None:
    """
    Note the present seed of torch's generator, right after torch's own import, as one that was
    not chosen.
    """
    _torch_seeds.append(_torch_seed())


def _was_seeded(before: Any) -> bool:
    """
    Return True if Python's own generator was seeded since it was in the state *before*.

    Drawing numbers from it does not count.
    """
    now, copy = random.getstate()[1][:_WORDS], random.Random()
    copy.setstate(before)
    for _ in range(_MOST_STATES):
        if copy.getstate()[1][:_WORDS] == now:
            return False
        copy.getrandbits(32 * _WORDS)
    return True


def _seed_torch() -> None:
    # The generator's own method: torch.seed() would queue a seed for each accelerator too.
    sys.modules["torch"].default_generator.seed()


def _numpy_generators() -> list[Callable[[], object]]:
    """
    Return functions that seed numpy's generators again, if their seeds were not chosen.

    These are its global generator, and those that modules made for themselves.
    """
    library: Any = sys.modules.get("numpy.random")
    if library is None:
        return []

    found = list[Callable[[], object]]()
    bits_of_global = getattr(library.mtrand._rand, "_bit_generator", None)

    # np.random.seed removes the sequence.
    was_seeded = bits_of_global is not None and getattr(bits_of_global, "seed_seq", None) is None
    if not was_seeded:
        found.append(library.seed)
    for each in gc.get_objects():
        # By the type, because asking an object for its class may run code of its own.
        if not issubclass(type(each), library.BitGenerator):
            continue
        if each is not bits_of_global and _by_chance(each):
            found.append(functools.partial(_start_anew, each))

    return found


def _start_anew(bits: Any) -> None:
    bits.state = type(bits)().state


def _by_chance(bits: Any) -> bool:
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy >= _LEAST_ENTROPY


def reseed() -> None:
    """
    Give each generator without a chosen seed a state of its own, in a worker of a fork server.
    """
    for each in (*_chosen, *_chance):
        each()


def reseed_caller() -> None:
    """
    Seed torch's and numpy's global generators again, in a worker that was forked from the caller.
    """
    seed = _torch_seed()
    if seed is not None and seed >= _LEAST_SEED:
        _seed_torch()
    library: Any = sys.modules.get("numpy.random")
    # Always, as Python does with its own generator: test tools leave the caller's generator as if
    # it had been seeded.
    if library is not None:
        library.seed()
