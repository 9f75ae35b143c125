"""Re-export: ``torch.distributed.elastic.timer.debug_info_logging``."""

from elasticlib.timer._fifo import log_debug_info_for_expired_timers

__all__ = ["log_debug_info_for_expired_timers"]
