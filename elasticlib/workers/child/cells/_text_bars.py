"""
``tqdm.notebook`` in a worker of a notebook: a bar of text in place of a widget, which only a kernel can show.

Rules of this file: the class itself is changed, since functions that were sent know it by its name and bring no other.
"""

from __future__ import annotations

import sys
from typing import Any

MODULE = "tqdm.notebook"
_OF_WIDGETS = ("status_printer", "display", "colour", "__iter__", "update", "close", "clear", "reset")
"""What the class overrides of that of text bars, apart from its constructor."""


def use_text() -> None:
    """Have the bars of ``tqdm.notebook``, which was imported, be of text."""
    kind: Any = getattr(sys.modules[MODULE], "tqdm_notebook", None)
    if kind is None:  # another version of it
        return
    for name in _OF_WIDGETS:
        if name in vars(kind):
            delattr(kind, name)

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("display", None)
        if isinstance(kwargs.get("ncols"), str):  # "100%": a text bar is as wide as its words say
            del kwargs["ncols"]
        super(kind, self).__init__(*args, **kwargs)

    kind.__init__ = begin
