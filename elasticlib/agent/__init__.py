"""
The agent, which supervises the workers of one node.

(torch: ``torch.distributed.elastic.agent.server``)

`SimpleElasticAgent` is one loop that waits for workers, the rendezvous and requests at once. For
each event it asks `_policy`, which is pure, for actions, and carries them out. `LocalElasticAgent`
runs workers as processes. The other names check a launch's settings before anything starts, and
serve torch's health check.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.agent._agent import ElasticAgent as ElasticAgent, SimpleElasticAgent as SimpleElasticAgent
    from elasticlib.agent._checks import check_health_check_server as check_health_check_server
    from elasticlib.agent._end_notice import EndNotice as EndNotice
    from elasticlib.agent._health import HealthCheckServer as HealthCheckServer
    from elasticlib.agent._local import LocalElasticAgent as LocalElasticAgent
    from elasticlib.agent._worker_watch import stop_health_check as stop_health_check

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.agent._agent": "ElasticAgent SimpleElasticAgent",
        "elasticlib.agent._checks": "check_health_check_server",
        "elasticlib.agent._end_notice": "EndNotice",
        "elasticlib.agent._health": "HealthCheckServer",
        "elasticlib.agent._local": "LocalElasticAgent",
        "elasticlib.agent._worker_watch": "stop_health_check",
    },
)
