"""
The choice of modules to import ahead of workers: torch, and others that the program's text shows
it will need.

`choose_preload` reads a script or a function, and returns the modules that a fork server imports
for it. `ForkServerKey` decides which programs may share that fork server. `Reads` lists the
environment variables that those imports have read. `ImportWatch` and the check for edited files
find modules that must be imported again.

To import one more module ahead, add it to the table in `_allowed`. The spawner imports this
package, so it needs the standard library only.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.preload._allowed import BY_VALUE as BY_VALUE, TORCH as TORCH, is_allowed as is_allowed
    from elasticlib.preload._chosen_modules import (
        choose_preload as choose_preload,
        needs_nothing_ahead as needs_nothing_ahead,
        preload_for as preload_for,
    )
    from elasticlib.preload._edited import EDITS as EDITS
    from elasticlib.preload._import_watch import ImportWatch as ImportWatch
    from elasticlib.preload._key import (
        ForkServerKey as ForkServerKey,
        depends_on_path as depends_on_path,
        import_path as import_path,
        stamps as stamps,
    )
    from elasticlib.preload._reads import Reads as Reads, serves as serves
    from elasticlib.preload._script_text import source_of as source_of, tree_of as tree_of

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.preload._allowed": "BY_VALUE TORCH is_allowed",
        "elasticlib.preload._chosen_modules": "choose_preload needs_nothing_ahead preload_for",
        "elasticlib.preload._edited": "EDITS",
        "elasticlib.preload._import_watch": "ImportWatch",
        "elasticlib.preload._key": "ForkServerKey depends_on_path import_path stamps",
        "elasticlib.preload._reads": "Reads serves",
        "elasticlib.preload._script_text": "source_of tree_of",
    },
)
