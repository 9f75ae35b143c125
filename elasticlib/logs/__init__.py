"""
Where the workers' output goes: the default specification, which keeps it in files.

`DefaultLogsSpecs` is for users. For the launcher: streams of a round, the console's copy of them, and their files.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.logs._specs import DefaultLogsSpecs as DefaultLogsSpecs

__getattr__, __dir__, __all__ = _lazy.names(__name__, {"elasticlib.logs._specs": "DefaultLogsSpecs"})
