"""Fixtures that the jobs of frameworks share with other tests of real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.conftest import nothing_is_left

__all__ = ["nothing_is_left"]


@pytest.fixture(autouse=True, scope="module")
def quiet_machine() -> Iterator[None]:
    """Make downloads fail at once; use one thread each, so that sums are the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
            patch.setenv(name, value)
        yield
