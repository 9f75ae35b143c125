"""What a worker's own code may do to its descriptors without harm to its report or its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticlib import LaunchConfig, elastic_launch

pytestmark = pytest.mark.slow
PAGE = b"of the user" * 20


def test_a_file_of_the_users_that_got_the_number_of_a_closed_report_is_not_written(tmp_path: Path) -> None:
    def train() -> int:
        os.closerange(3, 256)
        numbers = [os.open(tmp_path / f"{n}", os.O_WRONLY | os.O_CREAT) for n in range(40)]
        return sum(os.write(number, PAGE) for number in numbers)

    elastic_launch(LaunchConfig(nproc_per_node=1, preload=(), max_restarts=0), train)()

    assert {path.read_bytes() for path in tmp_path.iterdir()} == {PAGE}
