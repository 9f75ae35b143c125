"""
SSH servers on machines of their own, with a key pair that a test makes.

Rules of this file: everything lies in the test's folder. Each server has a ``/run`` of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import frozen

from tests.hosts._netns import Host
from tests.waiting import wait_until

_SSHD = "/usr/sbin/sshd"
_RUN = f"mount -t tmpfs tmpfs /run && mkdir -p /run/sshd && exec {_SSHD} -D -e -f"
_PORT = 22


@frozen
class Servers:
    """SSH servers that accept one key."""

    folder: Path

    def options(self, key: str = "key") -> tuple[str, ...]:
        """Arguments of ``ssh`` that log in with *key*, and use no file of the user's."""
        return (
            *("-F", "none", "-i", str(self.folder / key), "-o", "IdentitiesOnly=yes", "-o", "LogLevel=ERROR"),
            *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
        )


def missing_sshd() -> str:
    """Why there can be no SSH servers here; empty when there can."""
    lacking = [each for each in ("ssh", "ssh-keygen", _SSHD) if shutil.which(each) is None]
    return f"no {', '.join(lacking)} on this machine" if lacking else ""


@contextmanager
def servers(hosts: Sequence[Host], folder: Path) -> Iterator[Servers]:
    """An SSH server on each of *hosts*, which listens."""
    for name in ("key", "stranger", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    config = folder / "sshd_config"
    config.write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nPidFile none\nUsePAM no\nStrictModes no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\n"
    )
    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(_server(host, config))
        yield Servers(folder)


@contextmanager
def _server(host: Host, config: Path) -> Iterator[None]:
    path = config.with_name(f"sshd.{host.name}")
    with open(path, "wb") as log:
        server = host.popen(["sh", "-c", f'{_RUN} "$0"', str(config)], stdin=subprocess.DEVNULL, stderr=log)
    try:
        wait_until(lambda: "listening on 0.0.0.0" in path.read_text(), 20.0, path.read_text)
        yield
    finally:
        server.kill()
        server.wait()
