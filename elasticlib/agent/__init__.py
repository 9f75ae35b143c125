"""The agents: one supervises the workers of one node. (torch: ``torch.distributed.elastic.agent.server``)"""

from elasticlib.agent._agent import ElasticAgent, SimpleElasticAgent
from elasticlib.agent._local import LocalElasticAgent

__all__ = ["ElasticAgent", "LocalElasticAgent", "SimpleElasticAgent"]
