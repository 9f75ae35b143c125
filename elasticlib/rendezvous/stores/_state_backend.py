"""
A small shared state that is written whole and never over somebody else's change.

Rules of this file: the contract only; `_state_keys` builds a whole rendezvous on it. (torch:
``torch.distributed.elastic.rendezvous.dynamic_rendezvous``)
"""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

Token: TypeAlias = Any
"""Stands for one version of the state."""


class RendezvousBackend(abc.ABC):
    """Holds one state, for all nodes that were made for the same job."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The back end's name."""

    @abc.abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """
        The state and its token; None when there is none yet.

        Raises `RendezvousConnectionError` when the store fails and `RendezvousStateError` when what it holds
        was not written by such a back end.
        """

    @abc.abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """
        Write *state* if the present one is that of *token*; without a token, if there is none yet.

        What is there afterwards, its token, and whether that was written by this call. None when nothing was
        written and there is no state either. Raises as `get_state`.
        """
