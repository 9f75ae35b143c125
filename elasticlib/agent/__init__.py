"""The agents: one supervises the workers of one node. (torch: ``torch.distributed.elastic.agent.server``)"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.agent._agent import ElasticAgent as ElasticAgent, SimpleElasticAgent as SimpleElasticAgent
    from elasticlib.agent._local import LocalElasticAgent as LocalElasticAgent

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.agent._agent": "ElasticAgent SimpleElasticAgent",
        "elasticlib.agent._local": "LocalElasticAgent",
    },
)
