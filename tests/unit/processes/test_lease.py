"""Rules of the lease that processes of a node share."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest

from elasticlib.processes._lease import Lease


@pytest.fixture
def lease() -> Iterator[Lease]:
    lease = Lease()
    yield lease
    lease.close()


def test_another_process_sees_how_it_is_renewed(lease: Lease) -> None:
    other = Lease(os.dup(lease.fileno()))

    seen = [other.ends_at()]
    for end in (7.25, 8.5, math.inf):
        lease.renew(end)
        seen.append(other.ends_at())

    assert [math.inf, 7.25, 8.5, math.inf] == seen
    other.close()


def test_invalid_time_does_not_end_the_lease(lease: Lease) -> None:
    lease.renew(math.nan)

    assert math.inf == lease.ends_at()


def test_lease_can_be_closed_twice(lease: Lease) -> None:
    number = lease.fileno()
    lease.close()
    lease.close()

    assert -1 == lease.fileno()
    with pytest.raises(OSError):
        os.fstat(number)
