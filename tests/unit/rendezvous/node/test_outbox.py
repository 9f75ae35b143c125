"""A node's messages, sent again to a coordinator that may not have read them."""

from __future__ import annotations

from elasticlib.rendezvous.node._node_outbox import NodeOutbox
from elasticlib.rendezvous.node._session_events import Describe
from elasticlib.rendezvous.protocol._messages import Descriptor, Join, Report, Stopped, Succeeded
from elasticlib.rendezvous.protocol._progress import Seen

SEEN = Seen("nonce", 1, 3, 77)


def joined(outbox: NodeOutbox) -> NodeOutbox:
    outbox = outbox.add(Describe(1, "trainer"))
    return sent(outbox.described(outbox.join_seq, Join("a", Descriptor(1, "trainer", ("a",), 1), None)))


def sent(outbox: NodeOutbox, *reports: Report) -> NodeOutbox:
    for report in reports:
        outbox = outbox.add(report)
    while outbox.next is not None:
        outbox = outbox.done(outbox.next.seq)
    return outbox


def waiting(outbox: NodeOutbox) -> list[tuple[int, type[object]]]:
    return [(each.seq, type(each.what)) for each in outbox.envelopes]


def test_after_a_lost_store_all_is_sent_again_from_the_last_request() -> None:
    outbox = joined(sent(joined(sent(joined(NodeOutbox()), Stopped("a", 1, ()))), Stopped("a", 2, ())))

    again = outbox.again(SEEN, all_late=True)

    assert [(3, Join), (4, Stopped), (5, Join)] == waiting(again)
    join = again.envelopes[-1].what
    assert isinstance(join, Join) and (3, 1, 77) == (join.round, join.epoch, join.pulse)
    assert [(3, Join), (4, Stopped), (5, Join)] == waiting(sent(again).again(SEEN, all_late=True))


def test_messages_sent_since_the_last_request_are_sent_again_in_order() -> None:
    outbox = sent(joined(NodeOutbox()), Stopped("a", 1, ())).add(Succeeded("a", 1))

    assert [(1, Join), (2, Stopped), (3, Succeeded)] == waiting(outbox.again(SEEN, all_late=True))
    assert [(1, Join), (3, Succeeded)] == waiting(outbox.again(SEEN))
