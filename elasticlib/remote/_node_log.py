"""
The launcher's own messages on a machine of an engine, where the client's user sees them beside those of other machines.
"""

from __future__ import annotations

import logging

from elasticlib.rendezvous import host_name


def name_machine_in_log() -> None:
    """Write the launcher's warnings to stderr, each with the name of this machine."""
    logger = logging.getLogger("elasticlib")
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"{host_name()}: %(message)s"))
    logger.addHandler(handler)
    # A module of the user's function may configure the root logger, which would write each of them again.
    logger.propagate = False
