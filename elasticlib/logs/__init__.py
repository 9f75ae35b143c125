"""
Destinations of the workers' output: log files, their copy on the console, and the default of both.

`DefaultLogsSpecs` is for users. The launcher uses `prepare_streams` and `follow_streams` in each round.
`Tee` copies lines to the `Console`, with `BarText` for progress bars. `Follower`, `text_of` and
`last_line` are for programs that read files while they grow.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.logs._bar_text import BarText as BarText
    from elasticlib.logs._console import Console as Console, console_sink as console_sink
    from elasticlib.logs._follow import (
        Follower as Follower,
        end_of_text as end_of_text,
        last_line as last_line,
        shorten_file as shorten_file,
        text_of as text_of,
    )
    from elasticlib.logs._layout import (
        DEFAULT_PREFIX as DEFAULT_PREFIX,
        PREFIX_VARIABLE as PREFIX_VARIABLE,
        destinations_of as destinations_of,
        line_prefix as line_prefix,
    )
    from elasticlib.logs._old_folders import (
        keep_marked_folder as keep_marked_folder,
        make_marked_folder as make_marked_folder,
    )
    from elasticlib.logs._plugins import load_logs_specs as load_logs_specs
    from elasticlib.logs._specs import DefaultLogsSpecs as DefaultLogsSpecs
    from elasticlib.logs._streams import (
        ERROR_FILE as ERROR_FILE,
        Duplicates as Duplicates,
        LogRounds as LogRounds,
        follow_streams as follow_streams,
        full_folders as full_folders,
        make_run_folder as make_run_folder,
        prepare_streams as prepare_streams,
        warn_of_strange_ranks as warn_of_strange_ranks,
    )
    from elasticlib.logs._tee import GATHER_SECONDS as GATHER_SECONDS, Tee as Tee

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.logs._bar_text": "BarText",
        "elasticlib.logs._console": "Console console_sink",
        "elasticlib.logs._follow": "Follower end_of_text last_line shorten_file text_of",
        "elasticlib.logs._layout": "DEFAULT_PREFIX PREFIX_VARIABLE destinations_of line_prefix",
        "elasticlib.logs._old_folders": "make_marked_folder keep_marked_folder",
        "elasticlib.logs._plugins": "load_logs_specs",
        "elasticlib.logs._specs": "DefaultLogsSpecs",
        "elasticlib.logs._streams": (
            "Duplicates ERROR_FILE LogRounds follow_streams full_folders make_run_folder prepare_streams "
            "warn_of_strange_ranks"
        ),
        "elasticlib.logs._tee": "GATHER_SECONDS Tee",
    },
)
