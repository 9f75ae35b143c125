"""Every message that can be written, for tests of what reads them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from elasticlib._untrusted import LARGEST, line, lines
from elasticlib.rendezvous.protocol._messages import (
    EPOCH_BITS,
    LAST_EPOCH,
    Acknowledgement,
    Announcement,
    CallsCounted,
    Caution,
    Close,
    CoordinatorHeartbeat,
    Descriptor,
    Elaborate,
    Envelope,
    Failed,
    FailureNote,
    Final,
    GivenUp,
    Join,
    Leave,
    NodeHeartbeat,
    RankAssignment,
    RoundEnd,
    StopAgreed,
    StopAsked,
    Stopped,
    StopProposed,
    StopWanted,
    Succeeded,
    Terms,
)

text = st.text(max_size=8).filter(lambda each: each == line(each))
many = st.text(max_size=8).filter(lambda each: each == lines(each))
node = st.text(min_size=1, max_size=8).filter(lambda each: each == line(each))
count = st.integers(0, LARGEST)
descriptors = st.builds(
    Descriptor,
    slots=st.integers(1, 1000),
    role=text,
    addresses=st.lists(text, min_size=1, max_size=3).map(tuple),
    store_port=st.integers(0, 65535),
    index=st.none() | count,
    work=text,
    command=text,
)
notes = st.builds(
    FailureNote,
    rank=count,
    local_rank=count,
    pid=count,
    exitcode=st.integers(-64, 255),
    message=many,
    exception_type=text,
    traceback=many,
    hint=many,
    secondary=st.booleans(),
    age=st.floats(0, 1e9),
    process=text,
)
lists = st.lists(notes, max_size=2).map(tuple)
terms = st.builds(Terms, count, count, count)
places = st.tuples(count, count).filter(lambda pair: pair[0] < pair[1])
assignments = st.builds(
    lambda round, group, world, role, spent, most, addresses, port, why: RankAssignment(
        round, *group, *world, *role, spent, most, addresses, port, why
    ),
    count,
    places,
    places,
    places,
    count,
    count,
    st.lists(text, min_size=1, max_size=3).map(tuple),
    st.integers(0, 65535),
    text,
)
REPORTS: dict[type, st.SearchStrategy[Any]] = {
    Join: st.builds(Join, node, descriptors, st.none() | terms),
    Failed: st.builds(Failed, node, count, lists),
    Stopped: st.builds(Stopped, node, count, lists),
    Succeeded: st.builds(Succeeded, node, count),
    Leave: st.builds(Leave, node, text, st.none() | count, st.booleans(), st.booleans()),
    StopWanted: st.builds(StopWanted, node, count, text, st.floats(0, 1e9)),
    CallsCounted: st.builds(CallsCounted, node, count, count, st.floats(0, 1e9), count),
    Acknowledgement: st.builds(Acknowledgement, node),
    Close: st.builds(Close, node, text, st.booleans()),
}
BUILDERS: dict[type, st.SearchStrategy[Any]] = REPORTS | {
    Envelope: st.builds(Envelope, st.integers(1, LARGEST), st.one_of(*REPORTS.values())),
    Announcement: st.builds(Announcement, text, node, text, terms, st.just(0.0) | st.floats(0.1, 1e9), st.booleans()),
    CoordinatorHeartbeat: st.builds(
        CoordinatorHeartbeat, node, st.integers(0, ((LAST_EPOCH + 1) << EPOCH_BITS) - 1), text, count
    ),
    NodeHeartbeat: st.builds(NodeHeartbeat, count, count, count),
    RankAssignment: assignments,
    RoundEnd: st.builds(RoundEnd, count, text, st.booleans(), st.booleans(), st.booleans()),
    StopAsked: st.builds(StopAsked, count, text, st.floats(0, 1e9), count, count),
    StopProposed: st.builds(StopProposed, count, st.integers(1, LARGEST)),
    StopAgreed: st.builds(StopAgreed, count),
    GivenUp: st.builds(GivenUp, text),
    Elaborate: st.builds(Elaborate, count),
    Caution: st.builds(Caution, text),
    Final: st.builds(Final, st.booleans(), text, st.none() | node, st.none() | notes, text),
}
