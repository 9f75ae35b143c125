"""
The ``__main__`` of processes that a worker spawns when its function came from the caller's
``__main__``.

Such a process (a DataLoader worker, say) cannot import a notebook's cells. It gets the classes
and functions from the memory of the worker that spawned it.
"""

from elasticlib.workers.child import _function

_function.define_offered(globals())
