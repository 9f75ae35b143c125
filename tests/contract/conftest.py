"""Servers that back ends are tested against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer, find_etcd


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """An etcd server for the tests of one file."""
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(str(error))
    with EtcdServer() as server:
        yield server
