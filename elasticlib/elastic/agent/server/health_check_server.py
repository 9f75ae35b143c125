"""Re-export: ``torch.distributed.elastic.agent.server.health_check_server``."""

from elasticlib.agent._health import HealthCheckServer, create_healthcheck_server

__all__ = ["HealthCheckServer", "create_healthcheck_server"]
