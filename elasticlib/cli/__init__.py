"""
The command line: the table of options, the parser, and the request made from their values.

The command `elasticrun` is `elasticlib.run`, which uses this package. `Parser` reads options and
``PET_*`` variables. `request_of` makes a `LaunchConfig` and an entry point from them. `Brief` and
`progress_screen` write to a terminal. `subcommand` finds the commands that launch nothing, such as ``serve``.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.cli._brief import Brief as Brief
    from elasticlib.cli._end_report import give_allocation_back as give_allocation_back, report_end as report_end
    from elasticlib.cli._option_table import read_nodes as read_nodes, read_workers as read_workers
    from elasticlib.cli._parser import PROG as PROG, Parser as Parser
    from elasticlib.cli._request import Request as Request, by_source as by_source, request_of as request_of
    from elasticlib.cli._subcommands import SUBCOMMANDS as SUBCOMMANDS, subcommand as subcommand
    from elasticlib.cli._terminal import BETWEEN_BLOCKS as BETWEEN_BLOCKS, progress_screen as progress_screen
    from elasticlib.cli._verdict import ExitSettings as ExitSettings, exit_status as exit_status

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.cli._brief": "Brief",
        "elasticlib.cli._end_report": "give_allocation_back report_end",
        "elasticlib.cli._option_table": "read_nodes read_workers",
        "elasticlib.cli._parser": "PROG Parser",
        "elasticlib.cli._request": "Request by_source request_of",
        "elasticlib.cli._subcommands": "SUBCOMMANDS subcommand",
        "elasticlib.cli._terminal": "BETWEEN_BLOCKS progress_screen",
        "elasticlib.cli._verdict": "ExitSettings exit_status",
    },
)
