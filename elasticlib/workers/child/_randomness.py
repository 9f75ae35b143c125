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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

_LEAST_ENTROPY = 2**64
"""Below it a number was chosen by somebody; numpy takes 128 bits from the system."""
_LEAST_SEED = 2**32
"""The same for torch, which takes 64 bits."""

_chance: list[Callable[[], object]] = []
"""Seeds anew, one by one, what the fork server's imports left unseeded."""
_chosen: list[Callable[[], object]] = []
"""Restores what CPython itself seeds anew in each forked process."""


class _TorchSeed:
    """A finder of modules that notes with which seed torch's default generator comes into the world."""

    def __init__(self) -> None:
        self.value: int | None = None

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        self.leave()
        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "__dict__"):
            return spec
        plain = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            plain(module)
            self.value = _torch_seed()

        loader.exec_module = exec_module
        return spec

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _torch_seed() -> int | None:
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    return None if generator is None else int(generator.initial_seed())


class _Seeds:
    """Notes which generators of `random` come into the world, and whether anybody chooses their seeds."""

    def __init__(self) -> None:
        self.born: list[random.Random] = []
        self.chosen: dict[int, bool] = {}
        """By identity, whether the last seed of a generator was somebody's choice."""
        self._plain = random.Random.__init__, random.Random.seed, random.Random.setstate
        self._plain_module = random.seed, random.setstate

    def enter(self) -> None:
        begin, seed, setstate = self._plain

        def noted_begin(generator: random.Random, x: Any = None) -> None:
            begin(generator, x)
            self.born.append(generator)
            self.chosen[id(generator)] = x is not None

        def noted_seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            seed(generator, a, version)
            self.chosen[id(generator)] = a is not None

        def noted_setstate(generator: random.Random, state: Any) -> None:
            setstate(generator, state)
            self.chosen[id(generator)] = True

        # Of the class, and the module's functions, which are methods of its one hidden generator.
        common: random.Random = random._inst
        self._put(
            (noted_begin, noted_seed, noted_setstate),
            (functools.partial(noted_seed, common), functools.partial(noted_setstate, common)),
        )

    def leave(self) -> None:
        self._put(self._plain, self._plain_module)

    @staticmethod
    def _put(methods: tuple[Any, ...], functions: tuple[Any, ...]) -> None:
        generator: Any = random.Random
        generator.__init__, generator.seed, generator.setstate = methods
        random.seed, random.setstate = functions

    def common_was_chosen(self) -> bool:
        """Whether the module's own generator has a seed that somebody chose."""
        return self.chosen.get(id(random._inst), False)

    def by_chance(self) -> list[random.Random]:
        """Generators that others keep, and that nobody seeded."""
        return [each for each in self.born if sys.getrefcount(each) > 3 and not self.chosen[id(each)]]


@contextmanager
def observed() -> Iterator[None]:
    """While entered, modules are imported; afterwards `reseed` knows which of their generators nobody seeded."""
    torch_seed, seeds = _TorchSeed(), _Seeds()
    if "torch" in sys.modules:  # by a sitecustomize module, say
        found = _torch_seed()
        torch_seed.value = found if found is not None and found >= _LEAST_SEED else None
    sys.meta_path.insert(0, torch_seed)
    seeds.enter()
    try:
        yield
    finally:
        seeds.leave()
        torch_seed.leave()
    if seeds.common_was_chosen():
        state = random.getstate()
        _chosen.append(lambda: random.setstate(state))
    _chance.extend(each.seed for each in seeds.by_chance())
    if torch_seed.value is not None and torch_seed.value == _torch_seed():
        _chance.append(_seed_torch)
    _chance.extend(_numpy_generators())


def _seed_torch() -> None:
    # The generator's own method: torch.seed() would queue a seed for each accelerator too.
    sys.modules["torch"].default_generator.seed()


def _numpy_generators() -> list[Callable[[], object]]:
    """Seeds numpy's global generator, and those that modules made for themselves, where nobody chose a seed."""
    library: Any = sys.modules.get("numpy.random")
    if library is None:
        return []
    found = [] if _global_was_seeded(library) else [library.seed]
    mine = getattr(library.mtrand._rand, "_bit_generator", None)
    for each in gc.get_objects():
        # Of the type, since asking an object for its class may run code of its own.
        if issubclass(type(each), library.BitGenerator) and each is not mine and _by_chance(each):
            found.append(functools.partial(_start_anew, each))
    return found


def _start_anew(bits: Any) -> None:
    bits.state = type(bits)().state


def _global_was_seeded(library: Any) -> bool:
    bits = getattr(library.mtrand._rand, "_bit_generator", None)
    return bits is not None and getattr(bits, "seed_seq", None) is None  # which np.random.seed takes away


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
    library: Any = sys.modules.get("numpy.random")
    if library is not None:  # as Python does with its own: test tools leave the caller's as if it were seeded
        library.seed()
