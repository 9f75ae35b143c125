"""
What is learned of an entry point's imports, from run to run, and the file that keeps it for the next program.

Rules of this file: a file that is damaged, or that somebody else could have written, is left alone with one line;
nothing ever fails because of it; one file an entry point and interpreter, in a folder that does not grow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from elasticlib.workers.child._import_notes import Import, without

CACHE_VARIABLE = "ELASTICLIB_CACHE"
"""The folder of what is learned; empty for none."""
_FORMAT = 1
_MOST_IMPORTS = 2000
_MOST_BYTES = 1 << 19
_MOST_FILES = 200

_log = logging.getLogger(__name__)


@frozen
class Profile:
    """What all workers imported in the last run that ended well, and since."""

    imports: tuple[Import, ...] = ()
    refused: Mapping[str, Sequence[Any]] = Factory(dict)
    """What cannot be imported ahead: why, and what to import instead."""
    whole: bool = False
    """Whether a run has ended well, so that what is not there is not imported."""

    def after(self, imports: Sequence[Import], whole: bool) -> Profile:
        """With what a run's workers have imported so far, or in all."""
        known = {each.name: each for each in self.imports}
        # A variable that any run has changed stays in mind, and what the import took when it was not done ahead.
        seen = {each.name: each.joined(known.get(each.name, each)) for each in imports}
        kept = seen if whole else {**known, **seen}
        return Profile(tuple(kept.values())[:_MOST_IMPORTS], self.refused, whole or self.whole)

    def wanted(self) -> list[Import]:
        """What to import ahead."""
        return without(self.imports, self.refused)

    def needs_torch(self) -> bool:
        """Whether torch is to be imported ahead: not where a run has shown that it is not needed."""
        return not self.whole or any(each.name.partition(".")[0] == "torch" for each in self.imports)


def folder() -> Path | None:
    """Where profiles are kept; None for nowhere."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "elasticlib") if os.path.isabs(base) else None


def load(entry: str) -> Profile:
    """What is known of the entry point *entry*."""
    file = _file(entry)
    try:
        if file is None:
            return Profile()
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
                raise ValueError("somebody else could have written it")
            content = opened.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            body = json.loads(content)
        return _profile(body, entry)
    except FileNotFoundError:
        return Profile()
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is ignored, and written anew after this run: %s", file, error)
        return Profile()


def _profile(body: Any, entry: str) -> Profile:
    match body:
        case {
            "format": int(number),
            "entry": str(other),
            "imports": list(imports),
            "refused": dict(refused),
            "whole": w,
        }:
            if (number, other, type(w)) == (_FORMAT, entry, bool) and all(map(_is_refusal, refused.values())):
                found = Profile(tuple(map(Import.of, imports)), refused, w)
                found.wanted()
                return found
    raise ValueError("it is no profile of this entry point by this version")


def _is_refusal(body: Any) -> bool:
    return isinstance(body, list) and [type(each) for each in body] == [str, list]


def save(entry: str, profile: Profile) -> None:
    """Keep *profile* for the next program that runs *entry*; a disk that does not take it costs no more than that."""
    file = _file(entry)
    if file is None:
        return
    content = {"format": _FORMAT, "entry": entry, "imports": [each.plain() for each in profile.imports]}
    data = json.dumps(content | {"refused": dict(profile.refused), "whole": profile.whole}).encode()
    try:
        if len(data) > _MOST_BYTES:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".")  # 0600
        try:
            with open(descriptor, "wb") as opened:
                opened.write(data)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
        _remove_oldest(file.parent)
    except OSError as error:
        _log.debug("%s cannot be written: %s", file, error)


def _file(entry: str) -> Path | None:
    where = folder()
    if where is None:
        return None
    what = "\0".join((entry, sys.executable, sys.version, str(_FORMAT)))
    return where / f"imports-{hashlib.sha256(os.fsencode(what)).hexdigest()[:32]}.json"


def _remove_oldest(where: Path) -> None:
    files = [each for each in os.scandir(where) if each.name.startswith(("imports-", "."))]
    if len(files) > _MOST_FILES:
        for each in sorted(files, key=lambda each: each.stat().st_mtime)[: len(files) - _MOST_FILES]:
            os.unlink(each.path)
