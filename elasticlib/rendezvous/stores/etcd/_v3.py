"""
etcd's v3 API through its JSON gateway: transactions, leases, watches.

Rules of this file: related changes are one transaction, which has less than etcd's 128 operations
and 1.5 MiB. Bytes are sent as base64, 64-bit numbers as text.
"""

from __future__ import annotations

import base64
import math
import threading
import uuid
from collections.abc import Mapping, Sequence
from json import dumps, loads
from typing import Any, NoReturn

from attrs import Factory, define, evolve

from elasticlib._clock import monotonic
from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous.protocol._exchange import RequestRefusedError, parts
from elasticlib.rendezvous.stores._election import LeadershipLost
from elasticlib.rendezvous.stores._keys import KEEP, RAISE, KeyFound, Keys, RenewedKey
from elasticlib.rendezvous.stores.etcd._http import Line, Site

_NOT_FOUND = 5
_OPERATIONS = 120
_BYTES = 500_000
"""
Bytes of values in one request: by default etcd accepts 1.5 MiB of keys, values and names of fields.
"""
_REFUSALS = {3: "invalid", 7: "denied", 8: "exhausted", 12: "unknown", 16: "unauthenticated"}
"""Codes of answers that every repetition gets; other codes mean a server in trouble."""
_PASSING = "too many requests"
_TOO_LARGE = ("too large", "larger than max")
_ENTRIES = 2000
"""Most entries in the result of one look into a folder."""


@define(eq=False)
class Keeper:
    """The lease of all writes of one node, so that any of its connections keeps it alive."""

    lock: threading.Lock = Factory(threading.Lock)
    lease: int = 0
    renewed: float = 0.0
    seconds: float = KEEP
    """Seconds without renewal after which the lease ends and its keys are deleted."""


@define(eq=False)
class V3Keys(Keys):
    """`Keys` through the v3 API."""

    _line: Line
    _root: str = "/v3"
    _keeper: Keeper = Factory(Keeper)

    @property
    def site(self) -> Site:
        """The server's address."""
        return self._line.site

    def lasting(self, seconds: float) -> V3Keys:
        """
        Return another connection, whose keys stay for *seconds* after its last write, or at least
        two thirds of that.
        """
        return V3Keys(self._line.clone(), self._root, Keeper(seconds=seconds))

    def read(self, paths: Sequence[str]) -> tuple[list[KeyFound | None], int]:
        # The usual case: a range is cheaper than a transaction.
        if len(paths) == 1:
            reply = self._call("/kv/range", {"key": _b64(paths[0])})
            return [_only_item(reply)], _version(reply)

        items: list[KeyFound | None] = []
        versions = []
        for start in range(0, len(paths), _OPERATIONS):
            ranges = [{"request_range": {"key": _b64(path)}} for path in paths[start : start + _OPERATIONS]]
            reply = self._call("/kv/txn", {"success": ranges})
            versions.append(_version(reply))
            items += [_only_item(response["response_range"]) for response in reply.get("responses", ())]

        # From the oldest version on no change is missed.
        return items, min(versions, default=0)

    def write(self, values: Mapping[str, bytes], hold: RenewedKey | None = None) -> None:
        lease = self._lease()
        for part in parts(values, _OPERATIONS, _BYTES):
            self._commit([_put(key, data, lease) for key, data in part], hold)

    def append(self, folder: str, data: bytes) -> None:
        self.write({f"{folder}/{uuid.uuid4().hex}": data, _bell(folder): b""})

    def entries(self, folder: str, after: int) -> tuple[list[KeyFound], int]:
        query = {"min_create_revision": str(after + 1), "sort_order": "ASCEND", "sort_target": "CREATE"}
        reply = self._call("/kv/range", _folder(folder) | query | {"limit": str(_ENTRIES)})
        return [_item(kv) for kv in reply.get("kvs", ())], _version(reply)

    def swap(self, path: str, data: bytes, version: int, hold: RenewedKey | None = None) -> int | None:
        unchanged = {"key": _b64(path), "target": "MOD", "result": "EQUAL", "mod_revision": str(version)}
        put = _put(path, data, self._lease())
        reply = self._call("/kv/txn", {"compare": [unchanged, *_still(hold)], "success": [put]})
        if not reply.get("succeeded"):
            return None
        return _version(reply)

    def delete(self, paths: Sequence[str], hold: RenewedKey | None = None) -> None:
        if hold is None and len(paths) == 1:
            self._call("/kv/deleterange", {"key": _b64(paths[0])})
            return
        for start in range(0, len(paths), _OPERATIONS):
            part = paths[start : start + _OPERATIONS]
            self._commit([{"request_delete_range": {"key": _b64(path)}} for path in part], hold)

    def clear(self, folder: str, hold: RenewedKey | None = None) -> None:
        self._commit([{"request_delete_range": _folder(folder)}], hold)

    def changed(self, path: str, since: int, timeout: float, folder: bool = False) -> None:
        # A watch of a key also gets its value: a key without one shows that a folder grew.
        keys = {"key": _b64(_bell(path) if folder else path)}
        # From the next revision on: a change between look and watch ends the wait at once.
        body = dumps({"create_request": keys | {"start_revision": str(since + 1)}})
        answer = self._line.listen(f"{self._root}/watch", body, timeout, _is_event)
        if answer is not None and answer.status != 200:
            self._refuse("/watch", answer.json())

    def seize(self, path: str, name: str, ttl: float) -> RenewedKey | None:
        granted = self._call("/lease/grant", {"TTL": str(math.ceil(ttl))})
        lease = int(granted["ID"])
        token = f"{name}/{uuid.uuid4().hex[:8]}"
        put = _put(path, token.encode(), lease)
        # A key that does not exist has creation revision 0.
        reply = self._call("/kv/txn", {"compare": [_born(path, 0)], "success": [put]})
        hold = RenewedKey(path, token, _version(reply), lease, float(granted["TTL"]))
        if reply.get("succeeded"):
            return hold

        # The lease of an election that was lost is useless: it would stay for its time to live.
        self.release(hold)
        return None

    def renew(self, hold: RenewedKey) -> bool:
        # A lease lives on when its key was deleted.
        return self._renew(hold.lease) and self.holds(hold)

    def holds(self, hold: RenewedKey) -> bool:
        (item,), _ = self.read([hold.path])
        # The key of another holder was created at another revision.
        return item is not None and item.born == hold.born

    def release(self, hold: RenewedKey) -> None:
        # The only name of this call in all servers since 3.3. A lease that is gone is revoked
        # already.
        self._post("/kv/lease/revoke", {"ID": str(hold.lease)})

    def keep(self, folder: str) -> None:
        # All keys of this connection have one lease.
        del folder
        self._lease()

    def clone(self) -> V3Keys:
        return evolve(self, line=self._line.clone())

    def interrupt(self) -> None:
        self._line.interrupt()

    def close(self) -> None:
        self._line.close()

    def _lease(self) -> int:
        keeper = self._keeper
        with keeper.lock:
            now = monotonic()

            # A renewal is one more request: after a third of the lease's life it is early enough.
            is_fresh = keeper.lease != 0 and now - keeper.renewed <= keeper.seconds / 3
            if is_fresh:
                return keeper.lease
            is_alive = keeper.lease != 0 and self._renew(keeper.lease)
            if not is_alive:
                granted = self._call("/lease/grant", {"TTL": str(math.ceil(keeper.seconds))})
                keeper.lease = int(granted["ID"])

            keeper.renewed = now
            return keeper.lease

    def _renew(self, lease: int) -> bool:
        result = self._call("/lease/keepalive", {"ID": str(lease)}).get("result", {})
        return int(result.get("TTL", 0)) > 0

    def _commit(self, operations: list[dict[str, Any]], hold: RenewedKey | None) -> None:
        reply = self._call("/kv/txn", {"compare": _still(hold), "success": operations})
        if not reply.get("succeeded"):
            raise LeadershipLost("another node coordinates the job now, so etcd refused the write of this node")

    def _call(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        status, reply = self._post(verb, body)
        if status != 200 or "error" in reply:
            self._refuse(verb, reply)
        return reply

    def _post(self, verb: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = self._line.call("POST", self._root + verb, dumps(body))
        return answer.status, answer.json()

    def _refuse(self, verb: str, reply: dict[str, Any]) -> NoReturn:
        code = reply.get("code")
        if code == _NOT_FOUND:
            # Only leases are looked up by number: this one is gone, and the next write gets a new one.
            self._keeper.lease = 0

        why = _reason(reply)
        text = f"etcd at {self._line.site.url} refused {verb}: {why}"
        if not _is_final(code, why):
            raise RendezvousConnectionError(text)
        if any(each in why for each in _TOO_LARGE):
            raise RequestRefusedError(f"{text}; {RAISE}", too_large=True)

        raise RequestRefusedError(text)


def _reason(reply: dict[str, Any]) -> str:
    return str(reply.get("message") or reply.get("error") or reply)


def _is_final(code: object, why: str) -> bool:
    """Return whether the same request would be refused again."""
    # A busy server has the same code as a full one.
    return code in _REFUSALS and _PASSING not in why


def _b64(data: bytes | str) -> str:
    if isinstance(data, str):
        data = data.encode()
    return base64.b64encode(data).decode()


def _bell(folder: str) -> str:
    """Return the key that is written with each new one of the folder."""
    return f"{folder}.grew"


def _folder(folder: str) -> dict[str, str]:
    # "0" is the byte after "/".
    return {"key": _b64(f"{folder}/"), "range_end": _b64(f"{folder}0")}


def _still(hold: RenewedKey | None) -> list[dict[str, str]]:
    """Return the conditions under which *hold* is ours."""
    if hold is None:
        return []
    return [_born(hold.path, hold.born)]


def _born(path: str, version: int) -> dict[str, str]:
    return {"key": _b64(path), "target": "CREATE", "result": "EQUAL", "create_revision": str(version)}


def _put(path: str, data: bytes, lease: int) -> dict[str, Any]:
    return {"request_put": {"key": _b64(path), "value": _b64(data), "lease": str(lease)}}


def _version(reply: dict[str, Any]) -> int:
    return int(reply["header"]["revision"])


def _only_item(reply: dict[str, Any]) -> KeyFound | None:
    found = reply.get("kvs", ())
    if not found:
        return None
    return _item(found[0])


def _item(kv: dict[str, Any]) -> KeyFound:
    path = base64.b64decode(kv.get("key", ""))
    data = base64.b64decode(kv.get("value", ""))
    return KeyFound(path.decode("utf-8", "replace"), data, int(kv["mod_revision"]), int(kv["create_revision"]))


def _is_event(line: bytes) -> bool:
    try:
        message = loads(line)
    except ValueError:
        # etcd answers in JSON only: pass this line to the caller.
        return True
    result = message.get("result") or {}
    if "error" in message:
        return True
    return bool(result.get("events") or result.get("canceled"))
