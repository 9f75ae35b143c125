"""
A call of `elastic_launch` on the machines of an engine: ``on=Ssh(["h1", "h2"])``.

`RemoteLaunch` is the client's side: it packs the call, runs the engine's placement, and carries out the decisions of
`elasticlib.engines.Supervisor`. `_checked_engine` guards it from an engine's mistakes. The module `_node` is the agent
that the engine starts on each machine: it unpacks the call and launches one node. `_call` has the formats of their
messages. `_node_reports` has those of the workers' status and of questions about them, which `_node_reporter` sends
and `WorkersOfNodes` collects for `Job.status` and others.

On a batch system, ``on=Slurm(nodes=4)``, client and nodes exchange files instead: `_slurm` describes how. There
`WorkersOfBatch` reads the reports.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.remote._batch_launch import BatchLaunch as BatchLaunch, batch_launch as batch_launch
    from elasticlib.remote._checked_engine import check_number_of_nodes as check_number_of_nodes
    from elasticlib.remote._remote_launch import RemoteLaunch as RemoteLaunch
    from elasticlib.remote._slurm import Slurm as Slurm

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.remote._batch_launch": "BatchLaunch batch_launch",
        "elasticlib.remote._checked_engine": "check_number_of_nodes",
        "elasticlib.remote._remote_launch": "RemoteLaunch",
        "elasticlib.remote._slurm": "Slurm",
    },
)
