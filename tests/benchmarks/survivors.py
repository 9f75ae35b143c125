"""Faults that the simulation misses, with reasons, and faults by hand that no rule makes."""

from __future__ import annotations

SURVIVORS: dict[str, str] = {
    "node/_session_memory.py search: not (where)": "a simulated node always knows its store's place; test_session.py",
    "node/_session_memory.py search: not (status)": "a simulated node always knows its store's place; test_session.py",
    "node/_identity.py NodeIdentity.whole: root_node stays, not found.node": (
        "the end names the same node already, or does not refer to what was found"
    ),
    "node/_session.py Session._lose_connection: self.contact stays": "what it sets is set where a loss is judged, too",
    "node/_session.py Session._refuse: self._refusals stays": (
        "no history has so many refusals of one kind that some are not said"
    ),
    "node/_session.py Session._unless_too_late: not (self.final is not None)": (
        "ranks that come beside the job's end start nothing: the agent acts on the end"
    ),
    "node/_session_liveness.py _greeted: refusals stays, not 0": (
        "only how many refusals it takes to see that a host is gone, which is gone then"
    ),
    "node/_session_liveness.py _greeted: pause stays, not _FIRST_PAUSE": (
        "only how long the pause before an attempt is, within the longest one"
    ),
    "node/_session_liveness.py _take_heartbeat: not (contact.quiet_since)": ("only the seconds in a text for people"),
    "node/_session_liveness.py _take_heartbeat: over stays, not True": (
        "the session hears nothing more once its part is over"
    ),
    "coordinator/_outbox.py _Notice.shortened: notice stays, not brief(self.notice)": (
        "no simulated store refuses a document for the size of its notices; test_server_limits.py"
    ),
    "coordinator/_outbox.py Outbox.written: self._unread stays": ("nodes of simulated jobs always send heartbeats"),
    "coordinator/_outbox.py Outbox.is_untracked: not (known is not None)": (
        "no history has a memory set back that only the count of notices shows"
    ),
    "coordinator/_outbox.py Outbox.is_untracked: not (known != mailbox)": (
        "no history has a memory set back that only the count of notices shows"
    ),
    "coordinator/_outbox.py Outbox.is_untracked: not (state.final is not None)": (
        "no history has a memory set back after the end that only the count of notices shows"
    ),
    "coordinator/_outbox.py Outbox.expect: without self.end_unread.add(node)": (
        "who is expected counts as gone until it sends heartbeats, and is told the end then"
    ),
    "node/_node_outbox.py NodeOutbox._with_outcome_of_former: not (not isinstance(what, Succeeded))": (
        "no simulated node has another sidecar for the same round; test_session.py"
    ),
    "node/_node_outbox.py NodeOutbox._with_outcome_of_former: succeeded stays, not what.round": (
        "no simulated node has another sidecar for the same round; test_session.py"
    ),
    "node/_node_outbox.py NodeOutbox._late_without: not (each.seq not in numbers)": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_node_outbox.py NodeOutbox.again: without repeated += self._late_without({*waiting, self.join_seq})": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_node_outbox.py NodeOutbox.again: without repeated.sort(key=lambda message: message.seq)": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_node_outbox.py NodeOutbox.done: not (seq == self.join_seq)": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_node_outbox.py NodeOutbox.done: late stays": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_node_outbox.py NodeOutbox.done: without late += self.envelopes[:1]": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_node_outbox.py _since_last_join: not (isinstance(each.what, Join))": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_node_outbox.py _since_last_join: not (each.seq >= last)": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_node_outbox.py NodeOutbox.described: report stays": (
        "no simulated node has another sidecar for the same round; test_session.py"
    ),
    "node/_node_outbox.py NodeOutbox.add: join stays, not None": (
        "a request to join is said again once it was posted, and by then it is described; but where the store denied it"
    ),
    "node/_node_outbox.py NodeOutbox.elaborate: requested stays, not round": (
        "no history has failures after the coordinator asked for all of their round"
    ),
    "node/_session.py Session._apply_notice: without out.append(Log('warning', text))": "only a text for people",
    "node/_session.py Session._apply_notice: without self.unread += (notice,)": (
        "no history has a stop that all nodes agree on; test_common_stop.py"
    ),
    "node/_session.py Session._apply_notice: without self._withdraw_ranks(now, out) (2)": (
        "ranks that come beside the job's end start nothing; test_session.py"
    ),
    "node/_session.py Session._apply_notice: self._waiting stays (2)": (
        "only whether a node that waits for ranks says so in its log"
    ),
    "node/_session_liveness.py _with_signs_of_life: why_invalid stays, not \"the heartbeat of the job's "
    'coordinator is stale"': "only a text for people",
    "node/_session_liveness.py _lose_contact: try_at stays, not now": (
        "the moment of the last attempt lies before: the next one comes at once all the same"
    ),
    "node/_session_liveness.py _fence: trouble stays, not why": "only a text for people",
    "node/_session_liveness.py _seek: over stays, not True": "the session hears nothing more once its part is over",
    "node/_session_liveness.py _seek: over stays, not True (2)": "the session hears nothing more once its part is over",
    "node/_node_outbox.py NodeOutbox.done: late stays, not tuple(late)": (
        "no history has the store replaced with its coordinator; test_outbox.py"
    ),
    "node/_session_liveness.py _wake: compares stays, not False": (
        "the next answer has grown by an interval: it says nothing about a suspension"
    ),
    "node/_session_liveness.py _wake: contact stays (2)": (
        "nothing else is due in the step in which an agent is told of a suspension"
    ),
    "node/_session_liveness.py _wake: without the action *actions": (
        "nothing else is due in the step in which an agent is told of a suspension"
    ),
    "node/_session_liveness.py _broken: trouble stays, not why": ("only a text for people"),
    (
        "node/_session_liveness.py _broken: pause stays, not _FIRST_PAUSE if first "
        "else min(2 * contact.pause, _LONGEST_PAUSE)"
    ): ("only how long the pause before an attempt is, within the longest one"),
    "node/_session_liveness.py _broken: not (first) (3)": (
        "only how long the pause before an attempt is, within the longest one"
    ),
    "node/_session_liveness.py step: contact stays (4)": (
        "a request to join that is stored is followed at once by a heartbeat, whose answer says the same"
    ),
    "node/_session_liveness.py rejoin: acknowledged stays, not known": (
        "a heartbeat that was read was stored, and mostly its answer said so; test_session_liveness.py"
    ),
    "node/_session_liveness.py attempt_of: not (heartbeat)": "only how long an attempt that fails may take",
    "node/_session_liveness.py step: why_invalid stays, not ''": "only a text for people",
    "node/_session_liveness.py _broken: trying stays, not False": "the session sets it for itself at each loss, too",
    "node/_session_memory.py Waiting.log_line: why stays": "only a text for people",
    **dict.fromkeys(
        (
            "node/_own_heartbeats.py OwnHeartbeats.turn: not (self.ranks is None)",
            "node/_own_heartbeats.py OwnHeartbeats.hears: sent stays, not "
            "tuple((each for each in self._sent if each[0] >= count))",
        ),
        "only how many heartbeats are remembered; test_flatness.py",
    ),
    **dict.fromkeys(
        (
            "node/_own_heartbeats.py OwnHeartbeats.joins: known stays, not first",
            "node/_own_heartbeats.py OwnHeartbeats.assigned: known stays, not max(self._known, ranks.heartbeat_count)",
            "node/_own_heartbeats.py OwnHeartbeats.hears: known stays, not count",
        ),
        "another heartbeat could be meant only thousands of heartbeats later; test_session.py",
    ),
    "node/_own_heartbeats.py OwnHeartbeats.joins: ranks stays, not None": (
        "of the round before nothing is told that a heartbeat of the new mailbox was read"
    ),
    "node/_own_heartbeats.py OwnHeartbeats.joins: sent stays, not ()": (
        "whoever asks for ranks is told of none that it sent before"
    ),
    **{
        f"protocol/_progress.py Seen.{fault}": (
            "only a message that a stranger withholds for minutes needs it: test_session.py, test_server_handover.py"
        )
        for fault in (
            "after_greeting: heartbeat_count stays, not max(self.heartbeat_count, heartbeat.count)",
            "after_greeting: not (heartbeat is None)",
            "after_heartbeat: heartbeat_count stays, not max(self.heartbeat_count, heartbeat.count)",
        )
    },
    "protocol/_progress.py Seen.beyond: not (round >= 0)": "only a text for people",
}
"""The name of each fault that was not found, and why it was not."""

BY_HAND: dict[str, tuple[str, str, str]] = {
    "messages have no bound": (
        "node/_node_outbox.py",
        "from elasticlib.rendezvous.protocol._shortening import early, fitting, whole",
        "fitting = whole = lambda report, most=0: report\nearly = lambda report, before: report",
    ),
    "the request to join is sent again before each heartbeat": (
        "node/_session.py",
        "(envelope := self._outbox.next) is not None",
        "(envelope := (self._outbox.again(self.seen) if self._may_send_heartbeat() and now >= self._heartbeat_at "
        "else self._outbox).next) is not None",
    ),
    "the outbox keeps every node": ("coordinator/_outbox.py", "if node not in nodes]", "if not node]"),
    "notices are written again before a heartbeat can say that they were read": (
        "coordinator/_outbox.py",
        "if now >= each.at + timeout:",
        "if now > each.at:",
    ),
}
"""For each its file, a text that is there once, and what takes its place."""
