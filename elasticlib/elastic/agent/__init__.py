"""Re-export: ``torch.distributed.elastic.agent``."""
