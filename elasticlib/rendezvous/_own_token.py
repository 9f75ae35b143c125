"""
The default token of a job whose nodes must all be on this machine: that of the user who starts
them.

Every user of a machine can reach a port on loopback, and a node of a job runs code as the job's
owner.

Rules of this file: two launches of one user find the same token, whatever their environments are.
(HOME and XDG_RUNTIME_DIR differ between a login, cron and sudo.) The file is trusted only if no
other user can have read or written it. A launch without such a file runs without a token, and logs
that once.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elasticlib.processes import make_private_folder
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._endpoint import is_loopback, parse_rendezvous_endpoint
from elasticlib.spec import DEFAULT_PORT, TOKEN_VARIABLE

_log = logging.getLogger("elasticlib")

_TOKEN = re.compile("[0-9a-f]{64}")
_warned = set[int]()
"""Users for whom the warning about a missing token was logged."""


def token_of(job: NodeJob, environ: Mapping[str, str]) -> str | None:
    """
    Return the token of *job*: its own, else that of the variable (empty: none), else its user's on
    loopback.
    """
    if job.token is not None:
        return job.token
    if TOKEN_VARIABLE in environ:
        return environ[TOKEN_VARIABLE] or None
    if _is_local(job):
        return _own_token()
    return None


def tokens_of_server(environ: Mapping[str, str]) -> tuple[str | None, ...]:
    """
    Return the tokens that the jobs of a server may have: the variable's; else its user's or none.

    Nodes on the server's machine may use a loopback endpoint, and then have their user's token.
    """
    if TOKEN_VARIABLE in environ:
        return (environ[TOKEN_VARIABLE] or None,)

    user = os.geteuid()
    with suppress(OSError, ValueError):
        return read_or_make(_token_file(user), user), None
    return (None,)


def _is_local(job: NodeJob) -> bool:
    """
    Return whether the job's store only listens on loopback, and no node can reach it through a
    forwarded port.
    """
    if job.backend not in ("c10d", "static"):
        return False
    if job.backend == "c10d" and job.store_type != "tcp":
        return False
    # If a setting names the host, other nodes may reach it through a forwarded port on loopback.
    if job.backend == "c10d" and job.is_host is not None:
        return False
    host, _ = parse_rendezvous_endpoint(job.endpoint, DEFAULT_PORT)
    return is_loopback(host)


def _own_token() -> str | None:
    user = os.geteuid()
    try:
        return read_or_make(_token_file(user), user)
    except (OSError, ValueError) as error:
        if user not in _warned:
            _warned.add(user)
            risk = "other users of this machine can join your jobs on loopback endpoints"
            _log.warning("%s, because your token file cannot be used: %s; set %s", risk, error, TOKEN_VARIABLE)
        return None


def _token_file(user: int) -> Path:
    # From the user database and not from HOME, which sudo and cron set to other folders.
    return Path(_home(user), ".cache", "elasticlib", "token")


def _home(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_dir
    except KeyError:  # a container's user without a name
        return os.path.expanduser("~")


def read_or_make(path: Path, user: int) -> str:
    """
    Return the token in the file at *path*, and write the file if it is missing; raise OSError or
    ValueError on failure.
    """
    with suppress(FileNotFoundError):
        return _read(path, user)
    make_private_folder(str(path.parent))

    # Whole or not at all: of two launches at once, one writes the token, and the other one reads it.
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        os.unlink(fresh)

    return _read(path, user)


def _read(path: Path, user: int) -> str:
    # Without following a link, and without waiting for a named pipe that an attacker may have put
    # there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Check the open file: the path could lead to another one by now.
        facts = os.fstat(descriptor)
        is_private = facts.st_uid == user and not facts.st_mode & 0o077
        if not is_private or not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{path} is not a file that only user {user} can read: remove it, or chmod 600")
        token = os.read(descriptor, 100).decode("ascii", "replace")
    finally:
        os.close(descriptor)

    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{path} holds no token: remove it")

    return token
