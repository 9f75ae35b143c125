"""Re-export: ``torch.distributed.elastic.multiprocessing.redirects``."""

from elasticlib.logs._redirects import get_libc, get_std_cm, redirect, redirect_stderr, redirect_stdout

__all__ = ["get_libc", "get_std_cm", "redirect", "redirect_stderr", "redirect_stdout"]
