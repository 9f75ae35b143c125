"""Servers that backends are tested against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer
from tests.etcd import running_etcd


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """An etcd server for the tests of one file."""
    with running_etcd() as server:
        yield server
