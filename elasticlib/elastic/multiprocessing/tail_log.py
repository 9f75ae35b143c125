"""Re-export: ``torch.distributed.elastic.multiprocessing.tail_log``."""

from elasticlib.logs._tail_log import TailLog, tail_logfile

__all__ = ["TailLog", "tail_logfile"]
