"""
The name under which torch's users know the store over etcd: a door that imports torch only when it is used.

(torch: ``torch.distributed.elastic.rendezvous.etcd_store``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticlib.rendezvous._torch_store import EtcdStore

__all__ = ["EtcdStore"]


def __getattr__(name: str) -> object:
    """The class, whose base is torch's, imported at its first use."""
    if name != "EtcdStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elasticlib.rendezvous._torch_store import EtcdStore

    return EtcdStore


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
