"""
Processes, folders, memory and messages, behind one interface for all kernels.

`Handle` holds a process: it is readable once the process has ended, and signals that process
alone. `spawn` starts a helper, which ends with this program. The functions of `_reaper` watch a
parent and kill the processes below. `Channel` carries messages with descriptors between
processes, `anonymous_file` and its kin carry large content. `Caller` is the launching program, in
the state that its children would inherit.

Rules of this package: it imports the standard library and `errors` only, since the reaper starts
in milliseconds. No other package asks which kernel calls are used.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.processes._caller import (
        Caller as Caller,
        CallerIdentity as CallerIdentity,
        Surroundings as Surroundings,
    )
    from elasticlib.processes._descriptors import close_all_but as close_all_but, close_each as close_each
    from elasticlib.processes._folders import (
        absolute_path as absolute_path,
        absolute_path_without_parents as absolute_path_without_parents,
        current_folder as current_folder,
        current_folder_can_be_entered as current_folder_can_be_entered,
        enter_folder as enter_folder,
        folder_of_script as folder_of_script,
        identity_of_current_folder as identity_of_current_folder,
        is_own_folder as is_own_folder,
        make_private_folder as make_private_folder,
        make_temporary_folder as make_temporary_folder,
        may_write_in as may_write_in,
        name_of_current_folder as name_of_current_folder,
        out_of_removed_folder as out_of_removed_folder,
        path_of_current_folder as path_of_current_folder,
        time_of_change as time_of_change,
    )
    from elasticlib.processes._garbage_pauses import (
        shared_imports as shared_imports,
        without_garbage_collection as without_garbage_collection,
    )
    from elasticlib.processes._handles import (
        handle_of as handle_of,
        handle_of_parent as handle_of_parent,
        own_descriptors as own_descriptors,
        received_handle as received_handle,
        wait_for_ends as wait_for_ends,
    )
    from elasticlib.processes._large_files import (
        content_of_files as content_of_files,
        content_of_memory as content_of_memory,
        descriptors_of_memories as descriptors_of_memories,
        files_with_content as files_with_content,
        names_of_parts as names_of_parts,
        read_exactly as read_exactly,
        room_for_file as room_for_file,
        write_exactly as write_exactly,
    )
    from elasticlib.processes._lease import CUT_OFF as CUT_OFF, Lease as Lease
    from elasticlib.processes._mapping import mapped_bytes as mapped_bytes
    from elasticlib.processes._memory_files import (
        anonymous_file as anonymous_file,
        memfds as memfds,
        seal as seal,
        sealable_file as sealable_file,
    )
    from elasticlib.processes._pidfd import Handle as Handle, pidfds as pidfds
    from elasticlib.processes._programs import (
        AT_START_CODE as AT_START_CODE,
        BEGIN_CODE as BEGIN_CODE,
        BOOT_CODE as BOOT_CODE,
        CHANNEL_FD as CHANNEL_FD,
        FROM_OUTSIDE as FROM_OUTSIDE,
        KILL_SECONDS as KILL_SECONDS,
        ChildProcess as ChildProcess,
        HelperLostError as HelperLostError,
        Link as Link,
        Process as Process,
        above_standard_streams as above_standard_streams,
        check_system as check_system,
        closed_in_forks as closed_in_forks,
        debugger_follows as debugger_follows,
        flags_here as flags_here,
        flags_of as flags_of,
        followed_by_debugger as followed_by_debugger,
        fresh_command as fresh_command,
        importable_by as importable_by,
        links_to_children as links_to_children,
        open_files_needed as open_files_needed,
        search_path_argument as search_path_argument,
        spawn as spawn,
        start_error as start_error,
        start_thread as start_thread,
        unseen_by_debugger as unseen_by_debugger,
    )
    from elasticlib.processes._reaper import (
        FORK_SERVER_FD as FORK_SERVER_FD,
        KEPT_FD as KEPT_FD,
        REAPER_PATH as REAPER_PATH,
        STOP_SIGNALS as STOP_SIGNALS,
        adopt_orphans as adopt_orphans,
        descendants as descendants,
        die_with_parent as die_with_parent,
        guard_child as guard_child,
        is_ending as is_ending,
        is_memory_cleaner as is_memory_cleaner,
        is_paused as is_paused,
        kill_descendants as kill_descendants,
        living_parent as living_parent,
        new_parent as new_parent,
        outlive_parent as outlive_parent,
        process_facts as process_facts,
        settle_signals as settle_signals,
        signal_descendant as signal_descendant,
        signal_group as signal_group,
        signal_process as signal_process,
        wait_until_gone as wait_until_gone,
        wake_with_parent as wake_with_parent,
    )
    from elasticlib.processes._refusals import FEW_DESCRIPTORS as FEW_DESCRIPTORS, FEW_PROCESSES as FEW_PROCESSES
    from elasticlib.processes._sessions import Sessions as Sessions, SharedSessions as SharedSessions
    from elasticlib.processes._signal_masks import (
        catches as catches,
        has_default_action as has_default_action,
        ignores as ignores,
    )
    from elasticlib.processes._wire import (
        Channel as Channel,
        Message as Message,
        Waitable as Waitable,
        encoded_message as encoded_message,
        room_for_descriptors as room_for_descriptors,
        takes_more as takes_more,
        wait_for_change as wait_for_change,
        wait_readable as wait_readable,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.processes._caller": "Caller CallerIdentity Surroundings",
        "elasticlib.processes._descriptors": "close_all_but close_each",
        "elasticlib.processes._folders": (
            "absolute_path absolute_path_without_parents current_folder current_folder_can_be_entered "
            "enter_folder folder_of_script identity_of_current_folder is_own_folder make_private_folder "
            "make_temporary_folder may_write_in name_of_current_folder out_of_removed_folder "
            "path_of_current_folder time_of_change"
        ),
        "elasticlib.processes._handles": "handle_of handle_of_parent own_descriptors received_handle wait_for_ends",
        "elasticlib.processes._garbage_pauses": "shared_imports without_garbage_collection",
        "elasticlib.processes._large_files": (
            "content_of_files content_of_memory descriptors_of_memories files_with_content names_of_parts "
            "read_exactly room_for_file write_exactly"
        ),
        "elasticlib.processes._lease": "CUT_OFF Lease",
        "elasticlib.processes._mapping": "mapped_bytes",
        "elasticlib.processes._memory_files": "anonymous_file memfds seal sealable_file",
        "elasticlib.processes._pidfd": "Handle pidfds",
        "elasticlib.processes._programs": (
            "AT_START_CODE BEGIN_CODE BOOT_CODE CHANNEL_FD ChildProcess FROM_OUTSIDE HelperLostError "
            "KILL_SECONDS Link Process above_standard_streams check_system closed_in_forks debugger_follows "
            "flags_here flags_of followed_by_debugger fresh_command importable_by links_to_children "
            "open_files_needed search_path_argument spawn start_error start_thread unseen_by_debugger"
        ),
        "elasticlib.processes._reaper": (
            "FORK_SERVER_FD KEPT_FD REAPER_PATH STOP_SIGNALS adopt_orphans descendants die_with_parent "
            "guard_child is_ending is_memory_cleaner is_paused kill_descendants living_parent new_parent "
            "outlive_parent process_facts settle_signals signal_descendant signal_group signal_process wait_until_gone "
            "wake_with_parent"
        ),
        "elasticlib.processes._refusals": "FEW_DESCRIPTORS FEW_PROCESSES",
        "elasticlib.processes._sessions": "Sessions SharedSessions",
        "elasticlib.processes._signal_masks": "catches has_default_action ignores",
        "elasticlib.processes._wire": (
            "Channel Message Waitable encoded_message room_for_descriptors takes_more wait_readable wait_for_change"
        ),
    },
)
