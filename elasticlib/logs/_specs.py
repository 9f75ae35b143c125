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
from elasticlib.logs._layout import DEFAULT_PREFIX, TEMPORARY_BASE, attempt_names, destinations, run_folder_prefix
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


def _make_files(dest: LogsDest) -> None:
    """Make the folder of each rank and its stream files. Raises OSError if one exists."""
    for path in dest.error_files.values():
        os.mkdir(os.path.dirname(path))
    for path in (*dest.stdouts.values(), *dest.stderrs.values()):
        if path != os.devnull:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))


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
        self._base = ""
        self._last_base = ""
        self._run_id = ""
        self._run_folder = ""
        self._round_folder = ""

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
        return self._base or self._last_base or self._root_log_dir or ""

    def note_folder_of(self, launched: DefaultLogsSpecs) -> None:
        """Set `root_log_dir` to the folder that *launched*, the copy of an ended launch, has left, if any."""
        self._last_base = launched._base

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
                "log_dir", f"{self._root_log_dir!r} holds a NUL character: give the path of a folder"
            )
        if not os.path.isabs(self._root_log_dir):
            # Raises if the working directory no longer exists.
            current_folder()
        there = absolute_path_without_parents(self._root_log_dir)
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
            raise LogDirError(f"no folder for temporary logs: {error}; give log_dir or set TMPDIR") from error

    def has_files(self) -> bool:
        """Return False if workers will have no files: with `os.devnull`, or without a temporary folder."""
        if self._root_log_dir is not None:
            return self._root_log_dir != os.devnull
        try:
            self._check_temporary()
        except LogDirError:
            return False
        return True

    def _goes_without(self, error: Exception) -> bool:
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
            dest = self._destinations(self._make_attempt(first), len(envs))
            _make_files(dest)
        except (OSError, ValueError) as error:
            if self._goes_without(error):
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
            self._make_run_folder(run_id)
            if _is_requested(self._redirects) or _is_requested(self._tee):
                with tempfile.TemporaryFile(dir=self._run_folder, buffering=0) as probe:
                    probe.write(bytes(_ROOM))
        except (OSError, ValueError) as error:
            self.forget_unused()
            if not self._goes_without(error):
                raise self._refusal(error) from error

    def forget_unused(self) -> None:
        """Delete the launch folder that `make_ready` made, unless it has content by now."""
        if self._run_folder and not self._round_folder:
            self._remove_if_empty(self._run_folder)

    def _remove_if_empty(self, run_folder: str) -> None:
        base = os.path.dirname(run_folder)
        with contextlib.suppress(OSError):
            os.rmdir(run_folder)
            if run_folder == self._run_folder:
                self._run_folder = ""
            if self._root_log_dir is None:
                _old_folders.remove_if_empty(base)
                if base == self._base:
                    self._forget_folders()

    def _refusal(self, error: Exception) -> LogDirError:
        is_full = isinstance(error, OSError) and error.errno == errno.EMFILE
        fix = FEW_DESCRIPTORS if is_full else "; give another log_dir"
        return LogDirError.of_setting("log_dir", f"{self._root_log_dir!r} cannot be used: {error}{fix}")

    def _make_run_folder(self, run_id: str) -> None:
        if self._base:
            # A cleaner of /tmp may have removed the folders since the last round: this must not end the job.
            make_private_folder(self._base)
        elif self._root_log_dir is not None:
            base = absolute_path_without_parents(self._root_log_dir)
            os.makedirs(base, exist_ok=True)
            self._base = base
        if self._root_log_dir is None:
            if not self._base or not is_own_folder(
                self._base
            ):  # another user was quicker, and would own the files there
                self._base, self._run_folder = tempfile.mkdtemp(prefix=TEMPORARY_BASE), ""
            _old_folders.mark(self._base)
        if not self._run_folder or run_id != self._run_id:
            self._run_folder = tempfile.mkdtemp(prefix=run_folder_prefix(run_id), dir=self._base)
            self._run_id, self._round_folder = run_id, ""
        make_private_folder(self._run_folder)

    def _make_attempt(self, env: Mapping[str, str]) -> str:
        self._make_run_folder(env.get("TORCHELASTIC_RUN_ID", ""))
        for name in attempt_names(env.get("TORCHELASTIC_RESTART_COUNT", "0")):
            folder = os.path.join(self._run_folder, name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
                self._round_folder = folder
                return folder
        raise AssertionError("attempt_names does not end")

    def kept_temporary_folder(self) -> str:
        """Return the temporary folder that stays after the launch for its requested streams, else ``""``."""
        return self._base if self._root_log_dir is None and self.keeps_streams else ""

    def put_away(self, *, succeeded: bool) -> None:
        """Delete a temporary folder that is not needed after the launch."""
        if self.kept_temporary_folder():
            _old_folders.one_more(os.path.dirname(self._base), TEMPORARY_BASE)
        else:
            self.remove_if_temporary(only_if_empty=not succeeded)

    def remove_if_temporary(self, only_if_empty: bool = False) -> None:
        """
        Delete all logs of this object's launch if their base is a temporary folder. Errors are ignored.

        *only_if_empty*: keep them if a file is not empty, or if a file or folder cannot be read.
        """
        if not self._base or self._root_log_dir is not None:
            return
        if only_if_empty and _old_folders.holds_something(self._base):
            _old_folders.one_more(os.path.dirname(self._base), TEMPORARY_BASE)
            return
        shutil.rmtree(self._base, ignore_errors=True)
        self._forget_folders()

    def temporary_round(self) -> str:
        """Return the latest round's folder if it is below a temporary folder, else ``""``."""
        return self._round_folder if self._root_log_dir is None else ""

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


def _is_requested(streams: Std | Mapping[int, Std]) -> bool:
    """Return True if a stream of some rank is selected."""
    return any(streams.values()) if isinstance(streams, Mapping) else bool(streams)
