"""
`DefaultLogsSpecs`: the folders and files of a launch's logs.

Rules of this file: the constructor does no I/O. `check` raises early for folders that would fail later.
`reify` makes one folder for the launch and one below it for each round, and never overwrites anything. A
launch uses its own `for_launch` copy, so that one specification serves any number of launches, also at
the same time.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence

from elasticlib.errors import LogDirError
from elasticlib.logs import _old_folders
from elasticlib.logs._layout import DEFAULT_PREFIX, attempt_names, destinations, run_folder_prefix
from elasticlib.processes import (
    FEW_DESCRIPTORS,
    absolute_path_without_parents,
    current_folder,
    is_own_folder,
    make_private_folder,
    may_write_in,
)
from elasticlib.spec import LogsDest, LogsSpecs, Std

_log = logging.getLogger("elasticlib")

_NOT_WRITABLE = frozenset({errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})
"""Errors of a machine without a folder for temporary files (`tempfile` raises ENOENT), or without room in it."""

_ROOM = 4096
"""Free bytes that a folder of streams must have: the smallest block of file systems."""


class _LaunchFolders:
    """
    The folders of one launch: `base`, below it `run`, and below that `round`, of the latest round.

    Each is "" until it is made. `base` is *log_dir*; for None it is a temporary folder, which belongs to
    this launch alone.
    """

    def __init__(self, log_dir: str | None) -> None:
        self._log_dir = log_dir
        self._run_id = ""
        self.base = ""
        self.run = ""
        self.round = ""

    def temporary_base(self) -> str:
        """Return `base` if it is a temporary folder, else ""."""
        return self.base if self._log_dir is None else ""

    def make_run(self, run_id: str) -> None:
        """Make `base` and `run`, or make them again. Raises OSError."""
        if self.base:
            # A cleaner of /tmp may have removed the folders since the last round: this must not end the job.
            make_private_folder(self.base)
        elif self._log_dir is not None:
            base = absolute_path_without_parents(self._log_dir)
            os.makedirs(base, exist_ok=True)
            self.base = base

        if self._log_dir is None:
            # Another user may have been quicker to make the folder again, and would own the files in it.
            if self.base and is_own_folder(self.base):
                _old_folders.mark(self.base)
            else:
                self.base, self.run = _old_folders.make_marked_folder(), ""

        if not self.run or run_id != self._run_id:
            self.run = tempfile.mkdtemp(prefix=run_folder_prefix(run_id), dir=self.base)
            self._run_id, self.round = run_id, ""

        # Also a folder that exists already: a cleaner of /tmp may have removed it alone.
        make_private_folder(self.run)

    def make_round(self, restart_count: str) -> str:
        """Make another `round` in `run`, and return it. Raises OSError."""
        for name in attempt_names(restart_count):
            folder = os.path.join(self.run, name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
                self.round = folder
                return folder
        raise AssertionError("attempt_names does not end")

    def remove_if_empty(self, run_folder: str) -> bool:
        """
        Delete *run_folder*, of this or an earlier run, then its temporary base; stop at one that is not empty.

        Return True if `base` was deleted, so that none of these folders is left.
        """
        base = os.path.dirname(run_folder)
        with contextlib.suppress(OSError):
            os.rmdir(run_folder)
            if run_folder == self.run:
                self.run = ""
            if self._log_dir is None:
                _old_folders.remove_if_empty(base)
                return base == self.base
        return False


class DefaultLogsSpecs(LogsSpecs):
    """
    Specification that keeps redirected streams and error files below one folder.

    (torch: ``torch.distributed.elastic.multiprocessing.DefaultLogsSpecs``.) Differences from torch:

    * The constructor makes no folder.
    * A temporary folder is removed after a successful launch, unless it holds redirected streams.
    * A later round never deletes the logs of an earlier one.
    * All run ids are valid.
    * `reify` does not change the given environments.

    ``log_dir=None`` uses a temporary folder; `os.devnull` keeps no files and redirects nothing. If no
    temporary folder can be written, as in a read-only container, workers have no error files, and only
    files of streams raise an error. If more than 50 temporary folders exist, those older than a day are
    removed, the oldest first.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        redirects: Std | Mapping[int, Std] = Std.NONE,
        tee: Std | Mapping[int, Std] = Std.NONE,
        local_ranks_filter: Sequence[int] | set[int] | None = None,
    ) -> None:
        super().__init__(os.fspath(log_dir) if log_dir else None, redirects, tee, local_ranks_filter)
        self.default_prefix = DEFAULT_PREFIX
        """Template of the prefix of tee'd lines, unless the launch has one."""
        self.keeps_streams = _is_requested(redirects) or _is_requested(tee)
        """True if the caller requested files of streams: they stay after the launch, also in a temporary folder."""
        self._forget_folders()

    def _forget_folders(self) -> None:
        self._folders = _LaunchFolders(self._root_log_dir)
        self._last_base = ""
        """Folder that an ended launch of a copy has left."""

    def for_launch(self) -> DefaultLogsSpecs:
        """Return a copy for one launch: the same settings, its own folders. Use it in one thread at a time."""
        fresh = copy.copy(self)
        fresh._forget_folders()
        return fresh

    @property
    def root_log_dir(self) -> str:
        """
        *log_dir*, the folder of all launches; for a temporary folder ``""`` until `reify` makes it.

        After launches it is the folder of the last one that ended, if that was kept.
        """
        return self._folders.base or self._last_base or self._root_log_dir or ""

    def note_folder_of(self, launched: DefaultLogsSpecs) -> None:
        """Set `root_log_dir` to the folder that *launched*, the copy of an ended launch, has left, if any."""
        self._last_base = launched._folders.base

    def check(self) -> None:
        """Raise `LogDirError` if the log folder cannot be used, as far as a check without writing shows."""
        if self._root_log_dir == os.devnull:
            return

        if self._root_log_dir is None:
            if self._needs_files():
                self._check_temporary()
            return

        if "\0" in self._root_log_dir:
            raise LogDirError.of_setting(
                "log_dir", f"{self._root_log_dir!r} contains a NUL character: give the path of a folder"
            )

        if not os.path.isabs(self._root_log_dir):
            # Raises if the working directory no longer exists.
            current_folder()

        there = absolute_path_without_parents(self._root_log_dir)

        # The nearest thing that exists decides, even a broken link: no folder can take its place.
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        if not os.path.isdir(there):
            raise LogDirError.of_setting(
                "log_dir", f"{self._root_log_dir!r}: {there} is not a folder; give another log_dir"
            )
        if not may_write_in(there):
            raise LogDirError.of_setting(
                "log_dir", f"{self._root_log_dir!r}: {there} cannot be written; give another log_dir"
            )

    def _needs_files(self) -> bool:
        """Return True if the caller requested files, or named a folder for them."""
        return self._root_log_dir is not None or _is_requested(self._redirects) or _is_requested(self._tee)

    def _check_temporary(self) -> None:
        try:
            tempfile.gettempdir()
        except OSError as error:
            raise LogDirError(
                f"a folder for temporary logs cannot be created: {error}; give log_dir or set TMPDIR"
            ) from error

    def has_files(self) -> bool:
        """Return False if workers will have no files: with `os.devnull`, or without a temporary folder."""
        if self._root_log_dir is not None:
            return self._root_log_dir != os.devnull
        try:
            self._check_temporary()
        except LogDirError:
            return False
        return True

    def _continues_without(self, error: Exception) -> bool:
        """Return True if *error* prevents only error files, which the caller did not request; log it then."""
        is_unimportant = not self._needs_files() and isinstance(error, OSError) and error.errno in _NOT_WRITABLE
        if is_unimportant:
            _log.info("workers have no error files: %s", error)
        return is_unimportant

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """
        Make the folders of one round, with its stream files empty, and return their absolute paths.

        *envs* is {local rank: environment}. ``TORCHELASTIC_RUN_ID`` and ``TORCHELASTIC_RESTART_COUNT`` of the
        lowest rank name the folders. A new run id begins another launch folder. Error files are ``""`` with
        `os.devnull`, and if no files were requested and no temporary folder can be written. Raises
        `LogDirError`.
        """
        if self._root_log_dir == os.devnull:
            return self._destinations(None, len(envs))

        first = envs[min(envs)] if envs else {}
        try:
            self._folders.make_run(first.get("TORCHELASTIC_RUN_ID", ""))
            folder = self._folders.make_round(first.get("TORCHELASTIC_RESTART_COUNT", "0"))
            dest = self._destinations(folder, len(envs))
            _make_files(dest)
        except (OSError, ValueError) as error:
            if self._continues_without(error):
                return self._destinations(None, len(envs))
            raise self._refusal(error) from error

        return dest

    def _destinations(self, folder: str | None, workers: int) -> LogsDest:
        return destinations(folder, workers, self._redirects, self._tee, self._local_ranks_filter)

    def make_ready(self, run_id: str) -> None:
        """
        Make the launch folder of *run_id*, and check that it has room for streams, before the first round.

        `forget_unused` removes it again. Raises `LogDirError`.
        """
        if self._root_log_dir == os.devnull:
            return

        try:
            self._folders.make_run(run_id)
            if _is_requested(self._redirects) or _is_requested(self._tee):
                # A full disk takes an empty file, but not its first block.
                with tempfile.TemporaryFile(dir=self._folders.run, buffering=0) as probe:
                    probe.write(bytes(_ROOM))
        except (OSError, ValueError) as error:
            self.forget_unused()
            if not self._continues_without(error):
                raise self._refusal(error) from error

    def forget_unused(self) -> None:
        """Delete the launch folder that `make_ready` made, unless it has content by now."""
        if self._folders.run and not self._folders.round:
            self._remove_if_empty(self._folders.run)

    def _remove_if_empty(self, run_folder: str) -> None:
        if self._folders.remove_if_empty(run_folder):
            self._forget_folders()

    def _refusal(self, error: Exception) -> LogDirError:
        is_full = isinstance(error, OSError) and error.errno == errno.EMFILE
        fix = FEW_DESCRIPTORS if is_full else "; give another log_dir"
        return LogDirError.of_setting("log_dir", f"{self._root_log_dir!r} cannot be used: {error}{fix}")

    def kept_temporary_folder(self) -> str:
        """Return the temporary folder that stays after the launch for its requested streams, else ``""``."""
        return self._folders.temporary_base() if self.keeps_streams else ""

    def put_away(self, *, succeeded: bool) -> None:
        """Delete a temporary folder that is not needed after the launch."""
        if kept := self.kept_temporary_folder():
            _old_folders.keep_marked_folder(kept)
        else:
            self.remove_if_temporary(only_if_empty=not succeeded)

    def remove_if_temporary(self, only_if_empty: bool = False) -> None:
        """
        Delete all logs of this object's launch if their base is a temporary folder. Errors are ignored.

        *only_if_empty*: keep them if a file is not empty, or if a file or folder cannot be read.
        """
        base = self._folders.temporary_base()
        if not base:
            return
        if only_if_empty and _old_folders.holds_something(base):
            _old_folders.keep_marked_folder(base)
            return
        shutil.rmtree(base, ignore_errors=True)
        self._forget_folders()

    def temporary_round(self) -> str:
        """Return the latest round's folder if it is below a temporary folder, else ``""``."""
        return self._folders.round if self._root_log_dir is None else ""

    def remove_round(self, folder: str) -> None:
        """Delete *folder*, a `temporary_round`, and its parent folders unless they hold logs of other rounds."""
        shutil.rmtree(folder, ignore_errors=True)
        self._remove_if_empty(os.path.dirname(folder))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return self._settings() == other._settings()

    def _settings(self) -> tuple[object, ...]:
        return type(self), self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(log_dir={self._root_log_dir!r}, redirects={self._redirects!r}, "
            f"tee={self._tee!r}, local_ranks_filter={self._local_ranks_filter!r})"
        )


def _make_files(dest: LogsDest) -> None:
    """Make the folder of each rank and its stream files. Raises OSError if one exists."""
    for path in dest.error_files.values():
        os.mkdir(os.path.dirname(path))
    for path in (*dest.stdouts.values(), *dest.stderrs.values()):
        if path != os.devnull:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))


def _is_requested(streams: Std | Mapping[int, Std]) -> bool:
    """Return True if a stream of some rank is selected."""
    return any(streams.values()) if isinstance(streams, Mapping) else bool(streams)
