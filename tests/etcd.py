"""A real etcd server for tests; they are skipped where it is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer, find_etcd


@contextlib.contextmanager
def running_etcd() -> Iterator[EtcdServer]:
    """Run an etcd server within the block."""
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(str(error))
    with EtcdServer() as server:
        yield server
