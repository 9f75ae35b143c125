"""The client's side of a call on a batch system, without one."""

from __future__ import annotations

from typing import NoReturn

import pytest

from elasticlib import LaunchConfig, StartError, elastic_launch


class Full:
    """A batch system that takes no job."""

    nodes = 2

    def submit(self, title: str, packed: bytes, config: LaunchConfig) -> NoReturn:
        raise StartError(f"{title} was refused")


def train() -> None: ...


def test_a_job_that_is_refused_leaves_no_thread() -> None:
    with pytest.raises(StartError, match="train was refused"):
        elastic_launch(LaunchConfig(), train, on=Full())()
