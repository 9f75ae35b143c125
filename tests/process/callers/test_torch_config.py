"""Programs that are moved halfway: torch's own configuration, launched by `elasticlib.elastic_launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticlib import ConfigError, elastic_launch

pytestmark = pytest.mark.slow


def double(value: Any) -> Any:
    """Works on anything that can be multiplied."""
    return value * 2


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """torch's ``LaunchConfig``, which makes a temporary folder when it is made."""
    from torch.distributed.launcher.api import LaunchConfig

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return LaunchConfig


def test_torchs_configuration_launches_with_its_own_logs(torchs: Any, tmp_path: Path) -> None:
    config = torchs(1, 1, 2, run_id="job7", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)

    assert {0: "abab", 1: "abab"} == elastic_launch(config, double)("ab")

    assert config.logs_specs.root_log_dir.startswith(str(tmp_path))
    assert sorted(path.name for path in Path(config.logs_specs.root_log_dir).glob("job7_*/attempt_0/*")) == ["0", "1"]


def test_torchs_default_needs_the_servers_that_torch_would_need(torchs: Any) -> None:
    with pytest.raises(ConfigError, match=r"rdzv_endpoint=''.*'etcd' needs an etcd server"):
        elastic_launch(torchs(1, 1, 2), double)("ab")
