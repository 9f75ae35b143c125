"""
The command of a launch as one line, by which nodes of one job are compared, and which people read.
Pure.

Rules of this file: equal commands give equal lines, different ones give different lines. Users of
other nodes see the line, so values of options that name a secret are left out. A digest of all
arguments then keeps the lines different.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from json import dumps

LONGEST = 300
"""Characters of the line, without its digest."""
_SECRET = re.compile(r"(?i)token(?!iz|s)|secret|passw|api.?key|access.?key|credential|authorization")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "..."
_ASSIGNMENT = re.compile(r"([^=\s]+)=(.+)", re.DOTALL)
_DIGITS = 8


def command_line(work: str, args: Sequence[str]) -> str:
    """Return *work* with *args*, shortened, and without values that may be secret."""
    whole = shlex.join([work, *args])
    line = shlex.join([work, *_without_secrets(args)])
    if len(line) > LONGEST:
        # Both ends: the beginning names the script, the end has its last options.
        half = LONGEST // 2
        line = f"{line[:half]} ... {line[-half:]}"

    # Text was left out: two commands that differ there must give different lines all the same.
    if line == whole:
        return line

    return f"{line} (arguments {_digest(args)})"


def _without_secrets(args: Sequence[str]) -> list[str]:
    shown = []
    before = ""
    for arg in args:
        text = _hide_value(arg)
        if _is_secret_of(before, arg):
            text = _HIDDEN
        shown.append(_LOGIN.sub(_HIDDEN, text))
        before = arg
    return shown


def _is_secret_of(option: str, arg: str) -> bool:
    """Return whether *arg* is the value of the *option* before it, and a secret, as in ``--token abc``."""
    if not option.startswith("-") or arg.startswith("-"):
        return False
    has_value_already = _ASSIGNMENT.fullmatch(option) is not None
    return not has_value_already and _SECRET.search(option) is not None


def _hide_value(arg: str) -> str:
    """Return ``name=...`` for ``name=value`` where the name is that of a secret."""
    assigned = _ASSIGNMENT.fullmatch(arg)
    if assigned is None or not _SECRET.search(assigned[1]):
        return arg
    return f"{assigned[1]}={_HIDDEN}"


def _digest(args: Sequence[str]) -> str:
    return hashlib.sha256(dumps(list(args)).encode()).hexdigest()[:_DIGITS]
