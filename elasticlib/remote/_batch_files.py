"""
The files of one call on a batch system, in a folder that the client and all nodes share.

    submission.json      for `attach`: token, number of nodes, title
    call                 the packed call
    job.sh               the batch script
    number               the number of the job
    output, errors       output of the job
    result.RESTART.NODE  the packed outcome of a node, in the run of the job after RESTART restarts
    report.RESTART.NODE  the last report of a node on its workers (`NodeReport`), in that run
    ended.RESTART        its exit status
    kill                 the client does not wait for workers any more

Rules of this file: the folder is for this user alone. Each call, report and result begins with a code (HMAC) of its
name and its bytes, by the token of the submission: what others have written there is not unpickled. The job gets the
token in its environment, through Slurm's own channel. For another client it is in ``submission.json``, which counts
only if no other user can have read or written it. A file appears with all of its bytes, or not at all.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
from json import dumps
from typing import Any

from attrs import frozen

from elasticlib._untrusted import parse
from elasticlib.engines import LARGEST
from elasticlib.errors import ConfigError
from elasticlib.processes import make_private_folder

CALL = "call"
SCRIPT = "job.sh"
OUTPUT, ERRORS = "output", "errors"
MARK = "ended"
KILL = "kill"
_RECORD = "submission.json"
_NUMBER = "number"
_OF_NODE = re.compile(r"(result|report)\.(\d{1,9})\.(\d{1,9})")
_CODE = 32
"""Bytes of a code."""
_MOST = LARGEST + 2**16


@frozen
class SubmissionFacts:
    """The facts of a submission for another client."""

    nodes: int
    title: str
    raise_as: str
    is_step: bool
    """True if it is a step of a job that somebody else has submitted."""


@frozen
class BatchFolder:
    """The folder of one call."""

    path: str
    token: str

    @classmethod
    def made(cls, parent: str, title: str, token: str | None, record: SubmissionFacts) -> BatchFolder:
        """Make a folder in *parent*, without a *token* with a random one. Raises OSError."""
        path = tempfile.mkdtemp(prefix=f"{title}-", dir=parent)
        made = cls(path, token or secrets.token_hex(32))
        facts = {name: getattr(record, name) for name in ("nodes", "title", "raise_as", "is_step")}
        made._put(_RECORD, dumps({**facts, "token": made.token}).encode())
        return made

    @classmethod
    def found(cls, path: str) -> tuple[BatchFolder, SubmissionFacts]:
        """Return the folder at *path*, which another client of this user has made. Raises `ConfigError`."""
        try:
            facts = parse(_own_bytes(os.path.join(path, _RECORD)))
            record = SubmissionFacts(
                int(facts["nodes"]), str(facts["title"]), str(facts["raise_as"]), bool(facts["is_step"])
            )
            return cls(path, str(facts["token"])), record
        except OSError as error:
            raise ConfigError.of_setting("folder", f"{path!r} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError.of_setting("folder", f"{path!r} is not the folder of a call: {error}") from error

    def check_number(self, number: str) -> None:
        """Raise `ConfigError` if this folder is that of another job than *number*."""
        with contextlib.suppress(OSError):
            noted = _own_bytes(self.file(_NUMBER)).decode(errors="replace")
            if noted != number:
                raise ConfigError.of_setting("job_id", f"{number}: {self.path} is the folder of job {noted:.20}")

    def file(self, name: str) -> str:
        """Return the path of the file *name*."""
        return os.path.join(self.path, name)

    def write_text(self, name: str, text: str) -> None:
        """Write a file that is not unpickled. Raises OSError."""
        self._put(name, text.encode())

    def write(self, name: str, data: bytes) -> None:
        """Write *data*, with its code. Raises OSError."""
        self._put(name, self._code(name, data) + data)

    def read(self, name: str) -> bytes:
        """Return the data of the file *name*. Raises OSError, or ValueError if its code is wrong."""
        content = _regular_bytes(self.file(name))
        code, data = content[:_CODE], content[_CODE:]
        if not hmac.compare_digest(code, self._code(name, data)):
            raise ValueError(f"{self.file(name)} was not written by this job")
        return data

    def results(self) -> dict[tuple[int, int], str]:
        """Return {(restarts, node): name} of all results."""
        return self._of_nodes("result")

    def reports(self) -> dict[tuple[int, int], str]:
        """Return {(restarts, node): name} of all reports."""
        return self._of_nodes("report")

    def _of_nodes(self, kind: str) -> dict[tuple[int, int], str]:
        found = filter(None, map(_OF_NODE.fullmatch, self._names()))
        return {(int(each[2]), int(each[3])): each[0] for each in found if each[1] == kind}

    def has_ended(self, restarts: int) -> bool:
        """Return True if the run of the job after so many restarts has ended."""
        return os.path.exists(self.file(f"{MARK}.{restarts}"))

    def kills(self) -> bool:
        """Return True if the client does not wait for workers any more."""
        return os.path.exists(self.file(KILL))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def _code(self, name: str, data: bytes) -> bytes:
        return hmac.digest(self.token.encode(), name.encode() + b"\0" + data, "sha256")

    def _put(self, name: str, content: bytes) -> None:
        descriptor, path = tempfile.mkstemp(prefix=".", dir=self.path)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(path, self.file(name))
        except BaseException:
            # A full file system has room for the report of the error only without it.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


@frozen
class Submission:
    """A call that Slurm has."""

    folder: BatchFolder
    record: SubmissionFacts
    number: str
    """Number of the job of Slurm."""
    script: subprocess.Popen[bytes] | None = None
    """The script's process, if the call is a step that this program has started."""
    is_attached: bool = False
    """True if another client has submitted it."""

    @property
    def step_name(self) -> str:
        """Name of the step in the job of somebody else."""
        return os.path.basename(self.folder.path)

    def note(self) -> None:
        """Note number and folder for other clients; they need the folder's path if that is impossible."""
        link = link_of(self.number)
        with contextlib.suppress(OSError):
            self.folder.write_text(_NUMBER, self.number)
            make_private_folder(os.path.dirname(link))
            # A link cannot be written over, such as that of a job whose number Slurm has given
            # again.
            temporary = f"{link}.{os.getpid()}"
            os.symlink(self.folder.path, temporary)
            os.replace(temporary, link)

    def remove(self) -> None:
        """Remove all files."""
        shutil.rmtree(self.folder.path, ignore_errors=True)
        link = link_of(self.number)
        with contextlib.suppress(OSError):
            if os.readlink(link) == self.folder.path:
                os.unlink(link)


def default_folder() -> str:
    """Return the folder of calls for which the user has chosen none."""
    return os.path.join(os.path.expanduser("~"), ".elasticlib", "slurm")


def link_of(number: str) -> str:
    """Return the path of the link to the folder of job *number*."""
    return os.path.join(default_folder(), number)


def result_name(restarts: int, node: int) -> str:
    """Return the name of the file for the outcome of a node."""
    return f"result.{restarts}.{node}"


def report_name(restarts: int, node: int) -> str:
    """Return the name of the file for the reports of a node."""
    return f"report.{restarts}.{node}"


def _own_bytes(path: str) -> bytes:
    """Return the bytes of a file of this user alone. Raises OSError or ValueError."""
    found = os.lstat(path)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError(f"{os.path.basename(path)} can be read or written by other users")
    return _regular_bytes(path)


def _regular_bytes(path: str) -> bytes:
    """Return the bytes of a regular file. Raises OSError or ValueError."""
    # Whatever others have put there: no link is followed, and a pipe does not hold the reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found: Any = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST:
            raise ValueError(f"{path} is not a file of a call")
        return file.read()
