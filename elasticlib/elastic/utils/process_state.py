"""Re-export: ``torch.distributed.elastic.utils.process_state``."""

from elasticlib.utils.process_state import is_uninterruptible_state, read_proc_state

__all__ = ["is_uninterruptible_state", "read_proc_state"]
