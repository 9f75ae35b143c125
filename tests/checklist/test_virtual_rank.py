"""Rows 060 and 061: virtual local ranks."""

from __future__ import annotations

import pytest

from tests.checklist.peers import Peer

pytestmark = pytest.mark.slow


@pytest.mark.row(60)
@pytest.mark.parametrize(("listed", "devices"), [("4, GPU-6f ,7", ["4", "GPU-6f"]), (None, ["0", "1"])])
def test_each_worker_is_alone_with_its_entry_of_the_list(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, listed: str | None, devices: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}

    seen = peer.report("--virtual-local-rank", "--nproc-per-node", "2", env=env)

    assert [(rank, "0", device) for rank, device in enumerate(devices)] == [
        (each.rank, each.env["LOCAL_RANK"], each.env["CUDA_VISIBLE_DEVICES"]) for each in seen
    ]


@pytest.mark.row(61)
def test_list_with_fewer_entries_than_workers_starts_none(peer: Peer) -> None:
    done = peer.python(
        "from {distributed}.launcher.api import LaunchConfig, elastic_launch\n"
        "settings = dict(rdzv_backend='c10d', rdzv_endpoint='localhost:0', run_id='job', max_restarts=0)\n"
        "config = LaunchConfig(1, 1, 3, virtual_local_rank=True, **settings)\n"
        "try:\n"
        "    elastic_launch(config, 'touch')('ran${local_rank}')\n"
        "except ValueError as error:\n"
        "    print('refused:', error)\n",
        env={"CUDA_VISIBLE_DEVICES": "0,1"},
    )

    assert "refused: " in done.out, done.err
    assert "CUDA_VISIBLE_DEVICES" in done.out
    assert [] == list(peer.folder.glob("ran*"))
