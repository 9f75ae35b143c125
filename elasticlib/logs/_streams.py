"""
The log files of one round: made before its workers start, and followed if they are tee'd.

Rules of this file: every `LogsDest` reaches the tee through this module. Destinations that cannot work
raise an error before a worker of the round is started. A path that several streams share is followed
once.
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
from elasticlib.stacks import ranks_text

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
        """Return the words that select duplicated lines of *std*; empty if no lines are duplicated."""
        return {Std.OUT: self.stdout, Std.ERR: self.stderr}[std] or ()

    def check(self, dest: LogsDest) -> None:
        """Raise `ConfigError` if words are set and *dest* has no file for their lines."""
        for std, path in ((Std.OUT, dest.filtered_stdout), (Std.ERR, dest.filtered_stderr)):
            has_no_file = self.words(std) and not path
            if has_no_file:
                raise ConfigError.of_setting(
                    f"duplicate_{_NAMES[std]}_filters",
                    f"{list(self.words(std))!r} needs a file for the filtered lines, but the LogsDest of logs_specs "
                    f"has no filtered_{_NAMES[std]}: give a log_dir other than {os.devnull}, set that field in your "
                    "own LogsSpecs.reify, or leave the filters out",
                )

    def open(self, std: Std, dest: LogsDest) -> LineFilter | None:
        """Return the filter for the lines of *std* in the round of *dest*; None if none is needed."""
        words = self.words(std)
        if not words:
            return None

        files, path = {
            Std.OUT: (dest.tee_stdouts, dest.filtered_stdout),
            Std.ERR: (dest.tee_stderrs, dest.filtered_stderr),
        }[std]
        if not files:
            self._warn_once(std)
        return LineFilter(path, words)

    def _warn_once(self, std: Std) -> None:
        """Warn, in the first round only, that no line will ever be copied."""
        if std in self._warned:
            return
        self._warned.add(std)
        logger.warning(
            "duplicate_%s_filters has no effect: tee must include the %s of at least one shown worker; "
            "give tee=Std.%s (--tee %d, or 3 for both), or leave the filters out",
            *(_NAMES[std], _NAMES[std], std.name, std),
        )


def make_run_folder(specs: LogsSpecs, run_id: str) -> None:
    """
    Make the folder of the run if *specs* is a `DefaultLogsSpecs` that does not override `reify`.

    Raises `LogDirError`.
    """
    if not isinstance(specs, DefaultLogsSpecs):
        return
    makes_own_folder = type(specs).reify is not DefaultLogsSpecs.reify
    if not makes_own_folder:
        specs.make_ready(run_id)


@define
class LogRounds:
    """The rounds of one run; temporary logs are removed after success."""

    specs: LogsSpecs
    _folders: list[str] = field(factory=list, init=False)

    def reify(self, envs: Mapping[int, dict[str, str]]) -> LogsDest:
        """
        Return the destinations of a round.

        *envs*, {local rank: environment}, get the variables that `specs` sets for the workers. Each worker's
        ``TORCHELASTIC_ERROR_FILE`` is set afterwards; it is empty for a worker without an error file.
        """
        former = self._temporary_folder()
        dest = destinations_of(self.specs.reify(envs))
        folder = self._temporary_folder()

        # Other specifications have no temporary folder: both names are "" then.
        if folder != former:
            self._folders.append(folder)
        for rank, env in envs.items():
            # A specification may have set the variable in these environments itself.
            env[ERROR_FILE] = env.get(ERROR_FILE) or dest.error_files.get(rank, "")

        return dest

    def make_ready(self, run_id: str) -> None:
        """Raise `LogDirError` now if the next round could not write its logs, as far as that can be known."""
        make_run_folder(self.specs, run_id)

    def forget_unused(self) -> None:
        """Delete the folder of a run that had no round."""
        if isinstance(self.specs, DefaultLogsSpecs):
            self.specs.forget_unused()

    def _temporary_folder(self) -> str:
        """Return the temporary folder of the latest round; empty if there is none."""
        if isinstance(self.specs, DefaultLogsSpecs):
            return self.specs.temporary_round()
        return ""

    def put_away(self) -> None:
        """Delete the temporary logs of these rounds after success, unless the caller requested them."""
        if isinstance(self.specs, DefaultLogsSpecs) and not self.specs.kept_temporary_folder():
            self.remove_if_temporary()

    def remove_if_temporary(self) -> None:
        """Delete the temporary logs of these rounds, but not those of other runs of the specification."""
        if not isinstance(self.specs, DefaultLogsSpecs):
            return
        while self._folders:
            self.specs.remove_round(self._folders.pop())


def prepare_streams(dest: LogsDest) -> None:
    """
    Make the missing stream files of *dest*, and empty the others, which belong to an earlier round.

    Our own specification gives each round new files; others may not. Devices and pipes stay unchanged.
    Raises `LogDirError`.
    """
    for path in _stream_files(dest):
        try:
            if _is_device_or_pipe(path):
                continue
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise LogDirError(
                f"{path} cannot be opened for a worker's output: {error}; give another log_dir"
            ) from error


def _stream_files(dest: LogsDest) -> set[str]:
    """Return the files of all workers' streams, each once: several streams may share one."""
    return {*dest.stdouts.values(), *dest.stderrs.values()}


def _is_device_or_pipe(path: str) -> bool:
    """Return True for a *path* that cannot be emptied. Raises OSError for a broken link."""
    return os.path.lexists(path) and not stat.S_ISREG(os.stat(path).st_mode)


def full_folders(dest: LogsDest) -> list[str]:
    """Return one folder on each full file system with stream files, whose lines may be incomplete."""
    folders = {os.path.dirname(path) or "." for path in _stream_files(dest)}
    by_device: dict[int, str] = {}
    # The first folder of each file system is kept.
    for folder in sorted(folders, reverse=True):
        # OSError: the folder was removed.
        with contextlib.suppress(OSError):
            if _is_full(folder):
                by_device[os.stat(folder).st_dev] = folder
    return sorted(by_device.values())


def _is_full(folder: str) -> bool:
    """Return True if this user has no room left in the file system of *folder*."""
    facts = os.statvfs(folder)
    # Some virtual file systems do not count blocks.
    has_blocks = facts.f_blocks > 0
    is_root = os.geteuid() == 0
    free = facts.f_bfree if is_root else facts.f_bavail
    return has_blocks and free == 0


def follow_streams(
    tee: Tee,
    dest: LogsDest,
    prefixes: Mapping[int, bytes],
    duplicates: Duplicates,
    console: Console | None = None,
) -> None:
    """
    Copy the tee'd files of *dest* to the console, each line after its rank's prefix, and to the filtered files.

    On a *console* for this job only, a single file without prefix is copied byte by byte.

    Raises `ConfigError` if *dest* lacks a file for the lines of *duplicates*, or if a path to follow is not
    a file.
    """
    # A plug-in names its paths only in `reify`, so the check before the launch did not know them.
    duplicates.check(dest)
    followed = {*dest.tee_stdouts.values(), *dest.tee_stderrs.values()}
    if console is not None and followed:
        console.begin(tee.catch_up, tee.wake)
    has_prefix = any(map(prefixes.get, dest.tee_stdouts))

    # Nothing is written between the bytes of a single worker, so they need not be whole lines.
    is_alone = len(followed) == 1 and not has_prefix
    seen: set[str] = set()
    for std, files in ((Std.OUT, dest.tee_stdouts), (Std.ERR, dest.tee_stderrs)):
        copy = duplicates.open(std, dest)
        verbatim, bar = False, None

        # A filter needs whole lines, also of bars.
        if console is not None and copy is None:
            verbatim, bar = is_alone, console.bar
        for rank, path in files.items():
            if path not in seen:
                seen.add(path)
                _check_stream_file(std, rank, path)
                tee.follow(path, prefixes[rank], std, copy=copy, verbatim=verbatim, bar=bar)


def _check_stream_file(std: Std, rank: int, path: str) -> None:
    """Raise `ConfigError` if *path* is not a file."""
    if not os.path.isfile(path):
        raise ConfigError(
            f"tee_{_NAMES[std]}s[{rank}]={path!r} is not a file: give the file of the worker's {_NAMES[std]}",
        )


def warn_of_strange_ranks(logs: LogsSpecs, workers: int) -> None:
    """Warn of local ranks that *logs* names but this node lacks; another node of the job may have them."""
    for name in ("local_ranks_filter", "redirects", "tee"):
        # torch's own specifications use the same attribute.
        named = getattr(logs, f"_{name}", None)
        if isinstance(named, (Mapping, Set)):
            _warn_of_strange_ranks_in(name, named, workers)


def _warn_of_strange_ranks_in(name: str, named: Mapping[int, Std] | Set[int], workers: int) -> None:
    strange = sorted(rank for rank in named if rank not in range(workers))
    if not strange:
        return

    shows_no_worker = name == "local_ranks_filter" and len(strange) == len(named)
    logger.warning(
        "%s names %s, but this node has only %s: %s",
        name,
        ranks_text(strange, "local rank"),
        ranks_text(range(workers), "local rank"),
        "no worker of this node is shown on the console" if shows_no_worker else "that has no effect here",
    )
