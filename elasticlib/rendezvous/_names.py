"""
The name of a node: unique among nodes, and new after each start.
"""

from __future__ import annotations

import os
import uuid

from elasticlib._untrusted import as_name


def host_name(local_addr: str | None = None) -> str:
    """Return *local_addr*, else this machine's name."""
    return local_addr or os.uname().nodename


def node_name(local_addr: str | None = None) -> str:
    """
    Return ``host/process-random``, with the host of `host_name` without characters that other nodes
    would refuse.
    """
    return f"{as_name(host_name(local_addr))}/{os.getpid()}-{uuid.uuid4().hex[:8]}"
