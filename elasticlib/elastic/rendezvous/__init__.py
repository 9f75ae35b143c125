"""Re-export: ``torch.distributed.elastic.rendezvous``."""

from elasticlib import _lazy
from elasticlib.elastic.rendezvous.api import *  # noqa: F403 - as torch's does, with all of it

_lazy.offer(__name__)
