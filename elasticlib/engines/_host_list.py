"""
Slurm's lists of hosts, such as ``gpu[01-03,7],login1``. Pure.

Rules of this file: it understands what `scontrol show hostnames` does, which containers often lack.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_MOST = 65536
"""Number of hosts from which on a list is refused: more than any cluster has, and few enough for memory."""

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
"""One item of a list: text and brackets without a comma between them."""
_RANGE = re.compile(r"(?P<first>[0-9]{1,19})(-(?P<last>[0-9]{1,19}))?")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def hosts_of(text: str) -> tuple[str, ...]:
    """
    Return the names of the hosts in *text*, in its order.

    Raises ValueError for a text that is not a list of hosts, and for one with more than 65536 hosts.
    """
    hosts: list[str] = []
    end = 0
    for item in _ITEM.finditer(text):
        is_separated = text[end : item.start()] == ("," if hosts else "")
        if not is_separated:
            break
        # One more than allowed shows that there are too many. Several brackets can stand for
        # billions of names.
        hosts.extend(itertools.islice(_expanded(item[0]), _MOST + 1 - len(hosts)))
        end = item.end()

    if end != len(text) or not hosts:
        raise ValueError(f"{text[:80]!r} is not a list of hosts such as n[1-4]")
    if len(hosts) > _MOST:
        raise ValueError(f"{text[:80]!r} has more than {_MOST} hosts")
    return tuple(hosts)


def _expanded(item: str) -> Iterator[str]:
    """Yield the names of one item; of several brackets the last one counts fastest."""
    # Texts and contents of brackets take turns.
    parts = _BRACKET.split(item)
    choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
    for chosen in itertools.product(*choices):
        yield "".join(chosen)


def _numbers(text: str) -> list[str]:
    """Return the numbers of a bracket such as ``01-03,7``; leading zeros stay."""
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"[{text[:80]}] is not a list of numbers such as 1-4,7")

        first, last = found["first"], found["last"] or found["first"]
        count = int(last) - int(first) + 1
        # Checked before they are made: a short text can name a billion.
        if len(numbers) + count > _MOST:
            raise ValueError(f"[{text[:80]}] has more than {_MOST} numbers")
        numbers += [str(int(first) + step).zfill(len(first)) for step in range(count)]
    return numbers
