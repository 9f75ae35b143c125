"""How a node is called: differently from any other node, and from itself after a new start."""

from __future__ import annotations

import os
import uuid


def node_name(local_addr: str | None = None) -> str:
    """``host/process-random``, where the host is *local_addr*, else this machine's name."""
    return f"{local_addr or os.uname().nodename}/{os.getpid()}-{uuid.uuid4().hex[:8]}"
