"""torch's stores without the rest of torch, each time in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def output_of(script: str, *path: Path) -> str:
    """Return the output of *script*, run in a program that has `import_stores`."""
    head = "from elasticlib.rendezvous.sidecar import _torch\nimport sys\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


STORES = """
from torch.distributed import DistStoreError, FileStore, TCPStore
import datetime
limit = datetime.timedelta(seconds=0.1)
host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
store = TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False, timeout=limit)
store.set("key", b"value")
try:
    store.get("none")
except DistStoreError:
    print(host.get("key"))
"""


def test_the_stores_are_torchs_own_and_nothing_else_of_it_is_imported() -> None:
    assert "True\nb'value'\nTrue" == output_of(
        f"print(_torch.import_stores()){STORES}print(not any(name.startswith('torch.nn') for name in sys.modules))"
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "fault", ["_torch._TRIED = _torch.re.compile('0')", "sys.modules['torch._C'] = None", "import torch"]
)
def test_whole_torch_is_used_if_partial_import_is_not_known_to_work(fault: str) -> None:
    script = f"""
    {fault}
    print(_torch.import_stores())
    if sys.modules.get("torch._C", 1) is None:
        del sys.modules["torch._C"]
    import torch.distributed
    print(torch.zeros(1).item(), torch.distributed.is_available())
    """

    assert "False\n0.0 True" == output_of(script)


@pytest.mark.parametrize(
    "text", ["", "version = '2.13.0'", "__version__ = None", "\xe9", "__version__ = '2.13.0a0+git12'"]
)
def test_package_of_an_untried_release_is_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text(text, encoding="latin-1")

    assert "False False" == output_of("print(_torch.import_stores(), 'torch' in sys.modules)", tmp_path)


def test_without_torch_nothing_is_done(tmp_path: Path) -> None:
    script = """
    import importlib.util
    importlib.util.find_spec = lambda name: None
    print(_torch.import_stores(), "torch" in sys.modules)
    """

    assert "False False" == output_of(script)
