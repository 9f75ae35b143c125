"""
etcd's v2 keys API: folders, time to live, long polls, compare-and-set of one key.

Rules of this file: reads ask a quorum, else a lagging server answers with the past. Values are text there:
what is plain ASCII is kept readable, anything else is base64 with a mark.
"""

from __future__ import annotations

import base64
import binascii
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from attrs import define

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous.protocol._exchange import RequestRefusedError
from elasticlib.rendezvous.stores._election import LeadershipLost
from elasticlib.rendezvous.stores._keys import KEEP, RAISE, Hold, Item
from elasticlib.rendezvous.stores.etcd._http import Answer, LineKeys

_NOT_FOUND = 100
_COMPARE_FAILED = 101
_NOT_A_FILE = 102
_EXISTS = 105
_CLEARED = 401
_TOO_MUCH = 413
_REFUSALS = (400, 401, 403, 405, _TOO_MUCH)
"""Statuses of answers that are the same however often is asked; others speak of a server in trouble."""
_TOO_LARGE = "too large"
_BASE64 = "base64:"


@define(eq=False)
class V2Keys(LineKeys):
    """
    `Keys` by the v2 API, whose writes can check one key only, the one that is written: for a hold, one look before
    must do, and `swap` is safe by the version alone.
    """

    _seconds: float = KEEP
    """How long a folder stays after `keep`."""

    def lasting(self, seconds: float) -> V2Keys:
        """Another connection, which keeps folders for so long."""
        return V2Keys(self._line.clone(), seconds)

    def read(self, paths: Sequence[str]) -> tuple[list[Item | None], int]:
        items: list[Item | None] = []
        versions = []
        for path in paths:
            reply, answer = self._call("GET", path, query={"quorum": "true"}, fine=(_NOT_FOUND,))
            node = reply.get("node")
            items.append(_item(node) if node and "value" in node else None)
            versions.append(_index(answer))
        return items, min(versions, default=0)

    def write(self, values: Mapping[str, bytes], hold: Hold | None = None) -> None:
        self._check(hold)
        for path, data in values.items():
            self._call("PUT", path, {"value": _text(data)})

    def append(self, folder: str, data: bytes) -> None:
        self._call("POST", folder, {"value": _text(data)})

    def entries(self, folder: str, after: int) -> tuple[list[Item], int]:
        reply, answer = self._call("GET", folder, query={"quorum": "true"}, fine=(_NOT_FOUND,))
        items = [_item(node) for node in reply.get("node", {}).get("nodes", ()) if "value" in node]
        return sorted((item for item in items if item.born > after), key=lambda item: item.born), _index(answer)

    def swap(self, path: str, data: bytes, version: int, hold: Hold | None = None) -> int | None:
        del hold
        query = {"prevIndex": str(version)} if version else {"prevExist": "false"}
        unlike = (_NOT_FOUND, _COMPARE_FAILED, _EXISTS)
        reply, _ = self._call("PUT", path, {"value": _text(data)}, query, fine=unlike)
        return int(reply["node"]["modifiedIndex"]) if "node" in reply else None

    def delete(self, paths: Sequence[str], hold: Hold | None = None) -> None:
        self._check(hold)
        for path in paths:
            self._call("DELETE", path, fine=(_NOT_FOUND, _NOT_A_FILE))

    def clear(self, folder: str, hold: Hold | None = None) -> None:
        self._check(hold)
        self._call("DELETE", folder, query={"recursive": "true"}, fine=(_NOT_FOUND,))

    def changed(self, path: str, since: int, timeout: float, folder: bool = False) -> None:
        query = {"wait": "true", "waitIndex": str(since + 1)} | ({"recursive": "true"} if folder else {})
        answer = self._line.listen("GET", _url(path, query), "", timeout, lambda line: bool(line.strip()))
        if answer is not None:
            self._checked("GET", path, answer, (_CLEARED,))  # so much changed since that etcd forgot: look again

    def seize(self, path: str, name: str, ttl: float) -> Hold | None:
        seconds = math.ceil(ttl)
        token = f"{name}/{uuid.uuid4().hex[:8]}"
        reply, _ = self._call(
            "PUT", path, {"value": token, "ttl": str(seconds)}, {"prevExist": "false"}, fine=(_EXISTS,)
        )
        return Hold(path, token, int(reply["node"]["createdIndex"]), 0, float(seconds)) if "node" in reply else None

    def renew(self, hold: Hold) -> bool:
        fields = {"refresh": "true", "ttl": str(math.ceil(hold.ttl))}
        query = {"prevExist": "true", "prevValue": hold.token}
        reply, _ = self._call("PUT", hold.path, fields, query, fine=(_NOT_FOUND, _COMPARE_FAILED))
        return "node" in reply

    def holds(self, hold: Hold) -> bool:
        (item,), _ = self.read([hold.path])
        return item is not None and item.data == hold.token.encode()

    def release(self, hold: Hold) -> None:
        self._call("DELETE", hold.path, query={"prevValue": hold.token}, fine=(_NOT_FOUND, _COMPARE_FAILED))

    def keep(self, folder: str) -> None:
        fields = {"dir": "true", "ttl": str(math.ceil(self._seconds))}
        reply, _ = self._call("PUT", folder, fields, {"prevExist": "true"}, fine=(_NOT_FOUND,))
        if "node" not in reply:
            self._call("PUT", folder, fields, {"prevExist": "false"}, fine=(_EXISTS,))

    def _check(self, hold: Hold | None) -> None:
        if hold is not None and not self.holds(hold):
            raise LeadershipLost("another node coordinates now")

    def _call(
        self,
        method: str,
        path: str,
        fields: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        fine: tuple[int, ...] = (),
    ) -> tuple[dict[str, Any], Answer]:
        body = urlencode(fields or {})
        answer = self._line.call(method, _url(path, query or {}), body, "application/x-www-form-urlencoded")
        return self._checked(method, path, answer, fine), answer

    def _checked(self, method: str, path: str, answer: Answer, fine: tuple[int, ...]) -> dict[str, Any]:
        reply = answer.json()
        if answer.status >= 400 and reply.get("errorCode") not in fine:
            why = f"{reply.get('message')} ({reply.get('cause')})" if "message" in reply else reply
            said = f"etcd at {answer.url} refused {method} {path}: {why}"
            if answer.status in _REFUSALS or _TOO_LARGE in str(why):
                too_large = answer.status == _TOO_MUCH or _TOO_LARGE in str(why)
                raise RequestRefusedError(f"{said}; {RAISE}" if too_large else said, too_large)
            raise RendezvousConnectionError(said)
        return reply


def _url(path: str, query: Mapping[str, str]) -> str:
    return f"/v2/keys{quote(path)}" + (f"?{urlencode(query)}" if query else "")


def _index(answer: Answer) -> int:
    return int(answer.headers["X-Etcd-Index"])


def _item(node: dict[str, Any]) -> Item:
    return Item(node["key"], _bytes(node["value"]), int(node["modifiedIndex"]), int(node["createdIndex"]))


def _text(data: bytes) -> str:
    if data.isascii() and not data.startswith(_BASE64.encode()) and (text := data.decode()).isprintable():
        return text
    return _BASE64 + base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    if text.startswith(_BASE64):
        try:
            return base64.b64decode(text.removeprefix(_BASE64), validate=True)
        except binascii.Error:
            pass  # a stranger's: whoever decodes the message turns it down
    return text.encode("utf-8", "replace")
