"""
Random generators of a forked worker: seeded by chance, as in a fresh program, unless somebody chose their seed.

A fork copies its parent's generators, so that all ranks, restarts and launches would draw the same numbers: the same
dropout masks, shuffles and initial weights. The fork server notes which generators its imports left with a seed that
nobody chose; each worker seeds these anew. A module that seeds a generator at its import keeps that seed, as it does
in a program of its own.

Rules of this file: nothing of the observation is left when the imports are done; accelerators are not touched (their
generators are made, and seeded, when a worker first uses them).
"""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elasticlib.workers.child import _held
from elasticlib.workers.child._serving import ImportWaiter

_LEAST_ENTROPY = 2**64
"""Below it a number was chosen by somebody; numpy takes 128 bits from the system."""
_LEAST_SEED = 2**32
"""The same for torch, which takes 64 bits."""

_chance: list[Callable[[], object]] = []
"""Seeds anew, one by one, what the fork server's imports left unseeded."""
_chosen: list[Callable[[], object]] = []
"""Restores what CPython itself seeds anew in each forked process."""


def _torch_seed() -> int | None:
    generator = getattr(_held.module("torch"), "default_generator", None)
    return None if generator is None else int(generator.initial_seed())


@contextmanager
def _noted() -> Iterator[tuple[list[random.Random], dict[int, bool]]]:
    """While entered, the generators of `random` that are made, and by identity whether somebody chose their seeds."""
    born: list[random.Random] = []
    chosen: dict[int, bool] = {}
    common: random.Random = random._inst
    kind: Any = random.Random
    begin, seed, setstate = plain = kind.__init__, kind.seed, kind.setstate
    of_module = random.seed, random.setstate

    def noted_begin(generator: random.Random, x: Any = None) -> None:
        begin(generator, x)
        born.append(generator)
        chosen[id(generator)] = x is not None

    def noted_seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
        seed(generator, a, version)
        chosen[id(generator)] = a is not None

    def noted_setstate(generator: random.Random, state: Any) -> None:
        setstate(generator, state)
        chosen[id(generator)] = True

    # Of the class, and the module's functions, which are methods of its one hidden generator.
    kind.__init__, kind.seed, kind.setstate = noted_begin, noted_seed, noted_setstate
    random.seed, random.setstate = functools.partial(noted_seed, common), functools.partial(noted_setstate, common)
    try:
        yield born, chosen
    finally:
        kind.__init__, kind.seed, kind.setstate = plain
        random.seed, random.setstate = of_module


@contextmanager
def observed() -> Iterator[None]:
    """While entered, modules are imported; afterwards `reseed` knows which of their generators nobody seeded."""
    came_with: list[int | None] = []
    torch = ImportWaiter("torch", lambda: came_with.append(_torch_seed()))
    if _held.loaded("torch"):  # by a sitecustomize module, say
        found = _torch_seed()
        came_with.append(found if found is not None and found >= _LEAST_SEED else None)
    torch.enter()
    try:
        with _noted() as (born, chosen):
            yield
    finally:
        torch.leave()
    if chosen.get(id(random._inst), False):
        state = random.getstate()
        _chosen.append(lambda: random.setstate(state))
    # Those that others keep, and that nobody seeded.
    _chance.extend(each.seed for each in born if sys.getrefcount(each) > 3 and not chosen[id(each)])
    if came_with and came_with[-1] is not None and came_with[-1] == _torch_seed():
        _chance.append(_seed_torch)
    _chance.extend(_numpy_generators())


def _seed_torch() -> None:
    # The generator's own method: torch.seed() would queue a seed for each accelerator too.
    _held.module("torch").default_generator.seed()


def _numpy_generators() -> list[Callable[[], object]]:
    """Seeds numpy's global generator, and those that modules made for themselves, where nobody chose a seed."""
    library: Any = _held.module("numpy.random")
    if library is None:
        return []
    mine = getattr(library.mtrand._rand, "_bit_generator", None)
    was_seeded = mine is not None and getattr(mine, "seed_seq", None) is None  # which np.random.seed takes away
    found = [] if was_seeded else [library.seed]
    for each in gc.get_objects():
        # Of the type, since asking an object for its class may run code of its own.
        if issubclass(type(each), library.BitGenerator) and each is not mine and _by_chance(each):
            found.append(functools.partial(_start_anew, each))
    return found


def _start_anew(bits: Any) -> None:
    bits.state = type(bits)().state


def _by_chance(bits: Any) -> bool:
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy >= _LEAST_ENTROPY


def reseed() -> None:
    """In a worker of a fork server: give each generator that nobody seeded a state of its own."""
    for each in (*_chosen, *_chance):
        each()


def reseed_caller() -> None:
    """In a worker that was forked from the caller: the same for torch's and numpy's global generators."""
    seed = _torch_seed()
    if seed is not None and seed >= _LEAST_SEED:
        _seed_torch()
    library: Any = _held.module("numpy.random")
    if library is not None:  # as Python does with its own: test tools leave the caller's as if it were seeded
        library.seed()
