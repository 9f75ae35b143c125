"""
Countdown timers, which kill a worker that is stuck in a block, so that its group restarts.

A worker sets the time limit of a block with `expires`, through the client that it has configured.
The server runs in another process, and kills the worker when the time is over. With
``TORCHELASTIC_ENABLE_FILE_TIMER=1`` the launcher runs a server, whose path its workers find in
``TORCHELASTIC_TIMER_FILE``::

    from elasticlib import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60):
        torch.distributed.all_reduce(tensor)

(torch: ``torch.distributed.elastic.timer``, whose workers and servers use the same protocol)
"""

from elasticlib import _lazy
from elasticlib.timer._api import *  # noqa: F403 - all that it lists
from elasticlib.timer._fifo import *  # noqa: F403

_lazy.offer(__name__)
