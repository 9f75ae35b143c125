"""A fixed, seeded sample of the campaign in `tests.benchmarks.schedules`; the whole one is a command there."""

from __future__ import annotations

import pytest

from tests.benchmarks import schedules
from tests.hosts._netns import missing

pytestmark = pytest.mark.slow


@pytest.mark.sampled(0.2)  # the dearest of all; test_losses.py and test_arrivals.py have the same acts one by one
def test_random_losses_and_arrivals_end_as_foretold(backend: str) -> None:
    if why := missing():
        pytest.skip(why)

    bad = schedules.campaign(1, seed=3, backend=backend)

    assert [] == [(outcome.plan, outcome.complaints, outcome.report) for outcome in bad]
