"""
Processes as this kernel lets them be held, and memory that they share: in one way here, whatever the kernel offers.

A handle (`Handle`) is a descriptor that is readable once its process has ended, and through which that process alone is
signalled. Rules of this package: the standard library only, since the reaper imports it and must start in
milliseconds; nobody outside asks which way is taken.
"""

from elasticlib.processes._handles import (
    handle_of as handle_of,
    handle_of_parent as handle_of_parent,
    own_descriptors as own_descriptors,
    received_handle as received_handle,
    wait_for_ends as wait_for_ends,
)
from elasticlib.processes._imports import (
    shared_imports as shared_imports,
    without_garbage_collection as without_garbage_collection,
)
from elasticlib.processes._memory import (
    anonymous_file as anonymous_file,
    memfds as memfds,
    seal as seal,
    sealable_file as sealable_file,
)
from elasticlib.processes._pidfd import (
    Handle as Handle,
    pidfds as pidfds,
)
from elasticlib.processes._sessions import (
    Sessions as Sessions,
    SharedSessions as SharedSessions,
)
