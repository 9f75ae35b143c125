"""
One round's destinations made real: its files are there, and its tee'd ones are followed.

Rules of this file: it is the one way from a `LogsDest`, whoever made it, to the tee; what cannot work is refused
before a worker of the round is started; a path that several streams share is followed once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Mapping, Sequence, Set

from attrs import define, field

from elasticlib.errors import ConfigError, LogDirError
from elasticlib.logs._console import Console, LineFilter
from elasticlib.logs._layout import destinations_of
from elasticlib.logs._specs import DefaultLogsSpecs
from elasticlib.logs._tee import Tee
from elasticlib.spec import LogsDest, LogsSpecs, Std
from elasticlib.stacks import number_ranges, ranks_text

logger = logging.getLogger(__name__)

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}


@define
class Duplicates:
    """The words of ``duplicate_stdout_filters`` and ``duplicate_stderr_filters`` for all rounds of a launch."""

    stdout: Sequence[str] | None = None
    stderr: Sequence[str] | None = None
    _warned: set[Std] = field(factory=set, init=False)

    def words(self, std: Std) -> Sequence[str]:
        """What a line of *std* must hold one of; empty when nothing is asked for."""
        return (self.stdout if std == Std.OUT else self.stderr) or ()

    def check(self, dest: LogsDest) -> None:
        """Raise `ConfigError` when lines are asked for and *dest* has no file for them."""
        for std, path in ((Std.OUT, dest.filtered_stdout), (Std.ERR, dest.filtered_stderr)):
            if self.words(std) and not path:
                raise ConfigError(
                    f"duplicate_{_NAMES[std]}_filters={list(self.words(std))!r} needs a log folder, and logs_specs "
                    f"gives no path filtered_{_NAMES[std]}: give a log_dir that is not {os.devnull}, "
                    "let reify return one, or leave the filters out"
                )

    def open(self, std: Std, dest: LogsDest) -> LineFilter | None:
        """What takes the lines of *std* in the round of *dest*; None when none are asked for."""
        words, files = self.words(std), dest.tee_stdouts if std == Std.OUT else dest.tee_stderrs
        if not words:
            return None
        if not files and std not in self._warned:
            self._warned.add(std)
            logger.warning(
                "duplicate_%s_filters copies lines of tee'd streams, and %s of no shown worker is tee'd: "
                "give tee=Std.%s (--tee %d, or 3 for both), or leave the filters out",
                *(_NAMES[std], _NAMES[std], std.name, std),
            )
        return LineFilter(dest.filtered_stdout if std == Std.OUT else dest.filtered_stderr, words)


def make_run_folder(specs: LogsSpecs, run_id: str) -> None:
    """Have *specs* make the folder of the run, where it is of our own kind; raises `LogDirError`."""
    if isinstance(specs, DefaultLogsSpecs) and type(specs).reify is DefaultLogsSpecs.reify:
        specs.make_ready(run_id)


@define
class LogRounds:
    """The rounds of one run, whose logs go again where they are temporary and all has ended well."""

    specs: LogsSpecs
    _folders: list[str] = field(factory=list, init=False)

    def reify(self, envs: Mapping[int, dict[str, str]]) -> LogsDest:
        """
        The destinations of a round; what `specs` writes into *envs*, {local rank: environment}, is for the workers.

        Each worker's ``TORCHELASTIC_ERROR_FILE`` is there afterwards, empty when it has none.
        """
        former = self._made()
        dest = destinations_of(self.specs.reify(envs))
        if (folder := self._made()) != former:
            self._folders.append(folder)
        for rank, env in envs.items():
            env[ERROR_FILE] = env.get(ERROR_FILE) or dest.error_files.get(rank, "")
        return dest

    def make_ready(self, run_id: str) -> None:
        """Raise `LogDirError` now if the next round could not write its logs, as far as that can be known."""
        make_run_folder(self.specs, run_id)

    def forget_unused(self) -> None:
        """Leave no folder of a run that has come to no round."""
        if isinstance(self.specs, DefaultLogsSpecs):
            self.specs.forget_unused()

    def _made(self) -> str:
        return self.specs.temporary_round() if isinstance(self.specs, DefaultLogsSpecs) else ""

    def put_away(self) -> None:
        """Delete the logs of these rounds after success, unless they are temporary ones that stay."""
        if not (isinstance(self.specs, DefaultLogsSpecs) and self.specs.kept_temporary_folder()):
            self.remove_if_temporary()

    def remove_if_temporary(self) -> None:
        """Delete the logs of these rounds, and of no other run that the specification serves."""
        while self._folders and isinstance(self.specs, DefaultLogsSpecs):
            self.specs.remove_round(self._folders.pop())


def prepare_streams(dest: LogsDest) -> None:
    """
    Make the stream files of *dest* that are not there, and empty the others, which are of an earlier round.

    Our own specification gives each round new files; others may not. Devices and pipes are left as they are.
    Raises `LogDirError`.
    """
    for path in {*dest.stdouts.values(), *dest.stderrs.values()}:
        try:
            if os.path.lexists(path) and not stat.S_ISREG(os.stat(path).st_mode):
                continue
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise LogDirError(f"{path} cannot take a worker's output: {error}; give another log_dir") from error


def full_folders(dest: LogsDest) -> list[str]:
    """Of each file system without room where *dest* has stream files, one folder: lines may be missing there."""
    folders = {os.path.dirname(path) or "." for path in {*dest.stdouts.values(), *dest.stderrs.values()}}
    full: dict[int, str] = {}
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):  # the folder was taken away
            facts = os.statvfs(folder)
            if facts.f_blocks > 0 and (facts.f_bfree if os.geteuid() == 0 else facts.f_bavail) == 0:
                full[os.stat(folder).st_dev] = folder
    return sorted(full.values())


def follow_streams(
    tee: Tee, dest: LogsDest, prefixes: Mapping[int, bytes], duplicates: Duplicates, console: Console | None = None
) -> None:
    """
    Copy the tee'd files of *dest* to the console, each line after its rank's prefix, and to the filtered files.

    To a *console* that is the job's alone a file that is the only one, and has no prefix, is copied byte by byte.

    Raises `ConfigError` where *duplicates* asks for lines and *dest* has no file for them, or where a file to be
    followed is none.
    """
    duplicates.check(dest)
    seen: set[str] = set()
    followed = {*dest.tee_stdouts.values(), *dest.tee_stderrs.values()}
    if console is not None and followed:
        console.begin(tee.catch_up, tee.wake)
    verbatim = console is not None and len(followed) == 1 and not any(prefixes[rank] for rank in dest.tee_stdouts)
    for std, files in ((Std.OUT, dest.tee_stdouts), (Std.ERR, dest.tee_stderrs)):
        copy = duplicates.open(std, dest)
        for rank, path in files.items():
            if path in seen:
                continue
            if not os.path.isfile(path):
                raise ConfigError(f"tee_{_NAMES[std]}s[{rank}]={path!r} is not the file of a worker's stream")
            seen.add(path)
            bar = None if console is None or copy is not None else console.bar
            tee.follow(path, prefixes[rank], std, copy=copy, verbatim=verbatim and copy is None, bar=bar)


def warn_of_strange_ranks(logs: LogsSpecs, workers: int) -> None:
    """Say which local ranks *logs* names and this node does not have; another node of the job may have them."""
    for name in ("local_ranks_filter", "redirects", "tee"):
        named = getattr(logs, f"_{name}", None)  # where torch's own specifications keep it too
        if not isinstance(named, (Mapping, Set)):
            continue
        strange = sorted(rank for rank in named if rank not in range(workers))
        if strange:
            hidden = name == "local_ranks_filter" and len(strange) == len(named)
            logger.warning(
                "%s names %s, but this node has %s only: %s",
                name,
                ranks_text(strange, "local rank"),
                number_ranges(range(workers)),
                "no worker of this node is shown on the console" if hidden else "that has no effect here",
            )
