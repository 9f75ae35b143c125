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

import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

_WORDS = 624
"""Numbers of 32 bits that a Mersenne twister draws from one state."""
_MOST_BLOCKS = 1000
"""Turns of the state after which a generator that was drawn from counts as seeded."""
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


@contextmanager
def observed() -> Iterator[None]:
    """While entered, modules are imported; afterwards `reseed` knows which of their generators nobody seeded."""
    torch_seed, born = _TorchSeed(), list[tuple[random.Random, Any]]()
    plain = random.Random.__init__

    def noted(self: random.Random, x: Any = None) -> None:
        plain(self, x)
        if x is None:
            try:
                born.append((self, self.getstate()))
            except NotImplementedError:
                pass  # the system's own source has no state

    before = random.getstate()
    sys.meta_path.insert(0, torch_seed)
    random.Random.__init__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.__init__ = plain  # type: ignore[method-assign]
        torch_seed.leave()
    if not _goes_on(before, now := random.getstate()):
        _chosen.append(lambda: random.setstate(now))
    _chance.extend(each.seed for each, state in born if sys.getrefcount(each) > 3 and _goes_on(state, each.getstate()))
    if torch_seed.value is not None and torch_seed.value == _torch_seed():
        _chance.append(_seed_torch)
    _chance.extend(_numpy_generators())


def _goes_on(state: Any, later: Any) -> bool:
    """Whether a generator of `random` got from *state* to *later* by nothing but drawing."""
    clone = random.Random(0)
    clone.setstate(state)
    for _ in range(_MOST_BLOCKS):
        if clone.getstate()[1][:_WORDS] == later[1][:_WORDS]:
            return True
        clone.getrandbits(32 * _WORDS)
    return False


def _seed_torch() -> None:
    # The generator's own method: torch.seed() would queue a seed for each accelerator too.
    sys.modules["torch"].default_generator.seed()


def _numpy_generators() -> list[Callable[[], object]]:
    """Seeds numpy's global generator, and those that modules made for themselves, where nobody chose a seed."""
    library: Any = sys.modules.get("numpy.random")
    if library is None:
        return []
    found = [] if _global_was_seeded(library) else [library.seed]
    for each in gc.get_objects():
        if type(each) is library.Generator and _by_chance(each.bit_generator):
            found.append(lambda bits=each.bit_generator: setattr(bits, "state", type(bits)().state))
    return found


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
    if library is not None and not _global_was_seeded(library):
        library.seed()
