"""Re-export: ``torch.distributed.launcher``."""

from elasticlib.launch import elastic_launch, launch_agent
from elasticlib.spec import LaunchConfig

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
