"""
Countdown timers: a worker that is stuck in a block for too long is killed from outside, so that its group restarts.

A worker says with `expires` how long a block may take at most, through the client that it has configured; the
server, which runs in another process, kills it when the time is over. With ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` the
launcher runs a server, and its workers find it at ``TORCHELASTIC_TIMER_FILE``::

    from elasticlib import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60):
        torch.distributed.all_reduce(tensor)

(torch: ``torch.distributed.elastic.timer``, whose workers and servers speak the same protocol)
"""

from elasticlib import _lazy
from elasticlib.timer._api import *  # noqa: F403 - all that it lists
from elasticlib.timer._fifo import *  # noqa: F403

_lazy.offer(__name__)
