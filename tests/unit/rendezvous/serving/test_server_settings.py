"""Settings of a server of jobs: each wrong one is refused with its value."""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous import ServerSettings, serve


def test_settings_can_be_sent_to_another_process() -> None:
    settings = ServerSettings(port=0, host="node0", max_jobs=3, tokens=("secret", None))

    assert settings.plain() == ServerSettings(**settings.plain()).plain()
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("port", -1), ("port", 65536), ("port", "29400"), ("max_jobs", 0), ("max_jobs", True), ("host", "a b")],
)
def test_wrong_value_is_refused_before_anything_starts(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}={value!r}") as refused:
        with serve(**{setting: value}):
            pass

    assert setting == refused.value.setting
