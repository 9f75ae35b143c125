"""torch's names for the launch lead to ours."""

from __future__ import annotations

import elasticlib
import elasticlib.launcher.api
from elasticlib import launcher


def test_torchs_names_of_the_launch_are_ours() -> None:
    for door in (launcher, elasticlib.launcher.api):
        assert ["LaunchConfig", "elastic_launch", "launch_agent"] == sorted(door.__all__)
        assert [getattr(elasticlib, name) for name in door.__all__] == [getattr(door, name) for name in door.__all__]
