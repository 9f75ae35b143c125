"""
Options for a test's ranks, from a marker, a call or a class, over the settings. PURE.

Rules of this file: an error names the test, the invalid value, the rule and the fix. Nothing is
guessed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

NAMES = ("nproc", "backend", "timeout", "group", "device")
GROUPS = ("fresh", "shared", None)
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "fake")
_DEVICES = ("cpu", "cuda")


class MarkError(ValueError):
    """Invalid option of a marker or of a call of the fixture."""


@frozen
class RankOptions:
    """Options for the ranks of one test."""

    nproc: int = 2
    backend: str = "gloo"
    timeout: float = 60.0
    """Seconds that the test's function may take."""
    group: str | None = "fresh"
    """Process group: ``fresh``, ``shared`` with the tests before and after, or none (None)."""
    device: str = "cpu"
    """Type of the argument ``device``: ``cuda`` if the backend is nccl."""


def sizes(where: str, value: Any) -> tuple[int, ...]:
    """Return the numbers of ranks that ``nproc=`` names. Raises `MarkError`."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    found = tuple(value) if is_list else (value,)
    if not found:
        raise MarkError(f"{where}: nproc={value!r} lists no number of ranks: give at least one, such as nproc=[1, 2]")
    if not all(map(_is_size, found)):
        raise MarkError(f"{where}: nproc={value!r} must be 1 or more ranks, or a list of such numbers")
    if len(set(found)) < len(found):
        raise MarkError(f"{where}: nproc={value!r} lists a number twice: list each once")
    return found


def _is_size(value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and value >= 1


def checked_options(
    where: str, defaults: RankOptions, options: Mapping[str, Any], known: Collection[str] = (), args: Sequence[Any] = ()
) -> RankOptions:
    """
    Return *defaults* updated with *options*; ``nproc`` is a single number here.

    Raises `MarkError` that begins with *where*. *known*: backends other than torch's own.
    """
    if args:
        raise MarkError(
            f"{where}: {args[0]!r} must be a keyword argument: write nproc={args[0]!r}, or backend=..., timeout=..."
        )

    for name in options:
        if name not in NAMES:
            raise MarkError(f"{where}: {name}={options[name]!r} is unknown: options are {', '.join(NAMES)}")

    found = evolve(defaults, **options)
    sizes(where, found.nproc)
    _check_backend(where, found.backend, known)
    _check_group(where, found.group)
    _check_timeout(where, found.timeout)
    _check_device(where, found.device)
    if "nccl" not in found.backend:
        return found
    if options.get("device") == "cpu":
        raise MarkError(f"{where}: device='cpu' cannot be used with backend={found.backend!r}: leave device out")

    return evolve(found, device="cuda")


def _check_backend(where: str, backend: Any, known: Collection[str]) -> None:
    # torch lists a placeholder, "undefined", among its backends.
    every = [*_BACKENDS]
    every += [each for each in known if each not in (*_BACKENDS, "undefined")]
    parts: list[str] = []
    if isinstance(backend, str):
        # torch takes a backend for each type of device, as in cpu:gloo,cuda:nccl.
        parts = [part.rpartition(":")[2].lower() for part in backend.split(",")]
    if not parts or not set(parts).issubset(every):
        raise MarkError(f"{where}: backend={backend!r} is unknown: the backends are {', '.join(every)}")


def _check_group(where: str, group: Any) -> None:
    if group not in GROUPS:
        raise MarkError(f"{where}: group={group!r} must be 'fresh', 'shared' or None (the test makes its own)")


def _check_timeout(where: str, limit: Any) -> None:
    is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not is_number or not 0 < limit < math.inf:
        raise MarkError(f"{where}: timeout={limit!r} must be a number of seconds above 0")


def _check_device(where: str, device: Any) -> None:
    if device not in _DEVICES:
        raise MarkError(f"{where}: device={device!r} must be 'cpu' or 'cuda'")
