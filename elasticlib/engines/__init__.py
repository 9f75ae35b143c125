"""
Engines: programs that place one agent on each node, such as Slurm, Kubernetes and SSH.

`Ssh` and `Ray` start agents for ``elastic_launch(config, train, on=Ssh(["h1", "h2"]))``. `Slurm` submits such a call as
a job (`elasticlib.remote` has it, `_slurm_script` its text and `_slurm_jobs` its commands). `Engine` and `Placement`
are the protocol that another engine follows; `Supervisor` decides what is done about its agents. The base class
`KeepsAgents` gives an engine a ``with`` block, whose agents serve several calls.

For jobs that an engine has started on its own:

* `_placement`: the variables that an engine has left in the environment of this process; one reader for each engine.
* `_filling`: the options that a launch takes from it, which are only those that nobody gave.
* `_slurm_queries`: asks Slurm for the address of a node whose name does not resolve, the end of a job, and
  whether it was cancelled; requeues a job.
* `_kubernetes`: the manifests that ``elasticrun manifest`` prints.
* `_lost_script`: gives an allocation of Slurm back whose batch script was on a lost machine.

Ray and hosts over SSH have no reader: they start no agent on their own.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.engines._agent_frames import (
        LARGEST as LARGEST,
        MAGIC as MAGIC,
        FrameReader as FrameReader,
        Kind as Kind,
        event_of as event_of,
        frame as frame,
    )
    from elasticlib.engines._filling import (
        Filling as Filling,
        ending as ending,
        filling as filling,
        with_all_nodes as with_all_nodes,
    )
    from elasticlib.engines._kept_agents import KeepsAgents as KeepsAgents
    from elasticlib.engines._kubernetes import (
        MANIFEST_KINDS as MANIFEST_KINDS,
        PodSettings as PodSettings,
        manifest_of as manifest_of,
    )
    from elasticlib.engines._lost_script import (
        release_after_loss as release_after_loss,
    )
    from elasticlib.engines._placement import (
        ENGINES as ENGINES,
        EngineContext as EngineContext,
        engine_context as engine_context,
        is_shared_step as is_shared_step,
        scheduler_index as scheduler_index,
    )
    from elasticlib.engines._protocol import (
        AgentCommand as AgentCommand,
        AgentLost as AgentLost,
        AgentOutput as AgentOutput,
        AgentReport as AgentReport,
        AgentResult as AgentResult,
        AgentUp as AgentUp,
        BatchEngine as BatchEngine,
        Engine as Engine,
        EngineEnds as EngineEnds,
        EngineEvent as EngineEvent,
        Placement as Placement,
    )
    from elasticlib.engines._ray import Ray as Ray
    from elasticlib.engines._slurm_jobs import (
        SlurmJob as SlurmJob,
        allocation_of as allocation_of,
        cancel_job as cancel_job,
        check_nodes as check_nodes,
        slurm_job as slurm_job,
        steps_of as steps_of,
        submit_script as submit_script,
    )
    from elasticlib.engines._slurm_options import (
        BatchOptions as BatchOptions,
        SlurmValue as SlurmValue,
        name_of_job as name_of_job,
    )
    from elasticlib.engines._slurm_queries import (
        end_of_job as end_of_job,
        is_cancelled as is_cancelled,
        kill_wait as kill_wait,
        reachable as reachable,
        requeue as requeue,
    )
    from elasticlib.engines._slurm_script import batch_script as batch_script, output_options as output_options
    from elasticlib.engines._ssh import Ssh as Ssh
    from elasticlib.engines._supervisor import (
        Action as Action,
        AgentEnded as AgentEnded,
        BeginNode as BeginNode,
        CallRules as CallRules,
        OutcomeKind as OutcomeKind,
        PlaceAll as PlaceAll,
        RaiseError as RaiseError,
        Replace as Replace,
        ReportWait as ReportWait,
        ReturnResults as ReturnResults,
        StopAll as StopAll,
        Supervisor as Supervisor,
    )
    from elasticlib.remote import Slurm as Slurm

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.engines._placement": "ENGINES EngineContext engine_context is_shared_step scheduler_index",
        "elasticlib.engines._filling": "Filling ending filling with_all_nodes",
        "elasticlib.engines._agent_frames": "FrameReader Kind LARGEST MAGIC event_of frame",
        "elasticlib.engines._kept_agents": "KeepsAgents",
        "elasticlib.engines._kubernetes": "MANIFEST_KINDS PodSettings manifest_of",
        "elasticlib.engines._lost_script": "release_after_loss",
        "elasticlib.engines._protocol": (
            "AgentCommand AgentLost AgentOutput AgentReport AgentResult AgentUp BatchEngine Engine EngineEnds "
            "EngineEvent Placement"
        ),
        "elasticlib.engines._slurm_jobs": (
            "SlurmJob allocation_of cancel_job check_nodes slurm_job steps_of submit_script"
        ),
        "elasticlib.engines._slurm_queries": "end_of_job is_cancelled kill_wait reachable requeue",
        "elasticlib.engines._ray": "Ray",
        "elasticlib.engines._slurm_options": "BatchOptions SlurmValue name_of_job",
        "elasticlib.engines._slurm_script": "batch_script output_options",
        "elasticlib.engines._ssh": "Ssh",
        "elasticlib.engines._supervisor": (
            "Action AgentEnded BeginNode CallRules OutcomeKind PlaceAll RaiseError Replace ReportWait ReturnResults "
            "StopAll Supervisor"
        ),
        "elasticlib.remote": "Slurm",
    },
)
