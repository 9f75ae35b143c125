"""Words in a worker's arguments that stand for facts known only when the worker starts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


class macros:  # noqa: N801 - torch's name
    """
    What may stand in an argument, and how it is filled in.

    (torch: ``torch.distributed.elastic.utils.macros``)
    """

    local_rank = "${local_rank}"
    """Stands for the worker's rank on its node, whatever ``LOCAL_RANK`` says."""

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """
        The arguments with ``${local_rank}`` and ``$local_rank`` replaced; what is no text is passed through.

        Differs from torch's: everything else with a dollar stays as it is, ``$$`` too, so that a password
        arrives as it was typed.
        """
        # By a function: the rank is text to insert, not a pattern with backslashes.
        return [_LOCAL_RANK.sub(lambda _: str(local_rank), arg) if isinstance(arg, str) else arg for arg in args]


_LOCAL_RANK = re.compile(r"\$(?:\{local_rank\}|local_rank(?![A-Za-z0-9_]))")
