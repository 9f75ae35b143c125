"""
The address of a Slurm node whose name this machine cannot resolve.

Rules of this file: it asks the resolver first, and Slurm only if that fails. Without an answer the
name stays unchanged: the rendezvous reports that it cannot be resolved.
"""

from __future__ import annotations

import re
import socket
import subprocess

_LONGEST_ANSWER = 10.0
"""Seconds: Slurm's own MessageTimeout."""


def reachable(endpoint: str) -> str:
    """Return *endpoint*, a Slurm node's ``name:port``, with the node's address if its name does not resolve."""
    host, _, port = endpoint.rpartition(":")
    if _resolves(host):
        return endpoint
    address = _node_address(host)
    return f"{address}:{port}" if address and address != host else endpoint


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _node_address(host: str) -> str:
    """Return the address that Slurm uses for the node *host*; empty if Slurm does not say."""
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_ANSWER,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"(?:^| )NodeAddr=(\S+)", shown.stdout)
    return found[1] if found else ""
