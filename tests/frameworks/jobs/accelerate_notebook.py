"""
Accelerate's own test of notebooks, or parts of it: ``accelerate_notebook.py LAUNCHER TEST...``

They call `notebook_launcher` as a notebook's cell would; what that imports from ``torch.distributed.launcher.api`` is
elasticlib's where LAUNCHER is that.
"""

import functools
import os
import socket
import sys

launcher, *tests = sys.argv[1:]
if launcher == "elasticlib":
    import torch.distributed.elastic.multiprocessing.errors as torchs

    import elasticlib.errors
    import elasticlib.launcher.api

    sys.modules["torch.distributed.launcher.api"] = elasticlib.launcher.api
    torchs.ChildFailedError = elasticlib.errors.ChildFailedError  # which the tests expect to catch

from accelerate.test_utils.scripts import test_notebook  # noqa: E402


class Queue:
    """
    Source of the count in `test_fault_tolerant`: the restarts left to fail, equal for all workers.

    With a queue between processes that test depends on luck, under every launcher. A worker that is
    stopped while it reads keeps the lock. A worker that finds the queue empty leaves the others
    waiting for it in their process group.
    """

    count = 0

    def put(self, count):
        self.count = count

    def empty(self):
        return False

    def get(self):
        return self.count - int(os.environ["TORCHELASTIC_RESTART_COUNT"])


import torch.multiprocessing as processes  # noqa: E402

type(processes.get_context("fork")).Queue = lambda self: Queue()

with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
# 29500 may be somebody else's.
test_notebook.notebook_launcher = functools.partial(test_notebook.notebook_launcher, use_port=str(port))
for test in tests:
    getattr(test_notebook, test)()
