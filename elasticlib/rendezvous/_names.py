"""
The name of a node: unique among nodes, and new after each start.
"""

from __future__ import annotations

import os
import uuid

from elasticlib._untrusted import as_name


def host_name(local_addr: str | None = None) -> str:
    """*local_addr*, else this machine's name."""
    return local_addr or os.uname().nodename


def node_name(local_addr: str | None = None) -> str:
    """``host/process-random``, where the host is as in `host_name`, but for what no other node would take."""
    return f"{as_name(host_name(local_addr))}/{os.getpid()}-{uuid.uuid4().hex[:8]}"
