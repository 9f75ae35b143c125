"""Which scripts could import torch, by their text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticlib.workers._static_imports import Reach, reach


@pytest.mark.parametrize(
    "source",
    [
        "import os, sys\nprint(os.getcwd())",
        "from collections import abc\nimport json.decoder as d",
        "import helper",
        "from helper import name",
        "from package import part",
        "from package.part import name",
        "from . import helper",
        "def later():\n    import helper",
        "import itself",
    ],
)
def test_what_stays_within_python_and_its_own_files_does_not(source: str, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import socket\nname = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "part.py").write_text("from .beside import name\nfrom .. import helper\n")
    (tmp_path / "package" / "beside.py").write_text("name = 1\n")
    (tmp_path / "itself.py").write_text(source)

    assert Reach.NO is reach("torch", str(tmp_path / "itself.py"), str(tmp_path))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", Reach.NAMED),
        ("import numpy\ndef later():\n    import torch.nn as nn", Reach.NAMED),
        ("from torch import nn", Reach.NAMED),
        ("try:\n    import numpy\nexcept ImportError: pass", Reach.MAYBE),
        ("import deep", Reach.MAYBE),
        ("from deep import name", Reach.MAYBE),
        ("import importlib", Reach.MAYBE),
        ("__import__('torch')", Reach.MAYBE),
        ("exec('import torch')", Reach.MAYBE),
        ("import runpy", Reach.MAYBE),
        ("no python", Reach.MAYBE),
        ("from package import hidden", Reach.NAMED),
    ],
)
def test_what_leaves_them_or_hides_what_it_imports_may(source: str, expected: Reach, tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text("from deeper import name\n")
    (tmp_path / "deeper.py").write_text("import lightning\nname = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "hidden.py").write_text("import torch\n")
    (tmp_path / "script.py").write_text(source)

    assert expected is reach("torch", str(tmp_path / "script.py"), str(tmp_path))


def test_a_file_of_a_projects_own_hides_the_installed_one(tmp_path: Path) -> None:
    """As it does when the script runs: its folder comes first on the search path."""
    (tmp_path / "torch.py").write_text("import os\n")
    (tmp_path / "script.py").write_text("import torch\n")

    assert Reach.NO is reach("torch", str(tmp_path / "script.py"), str(tmp_path))


def test_what_cannot_be_read_in_short_time_may(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("# " + "x" * (1 << 20))
    for number in range(120):
        (tmp_path / f"chain{number}.py").write_text(f"import chain{number + 1}\n")
    (tmp_path / "chain120.py").touch()

    assert Reach.MAYBE is reach("torch", str(tmp_path / "long.py"), str(tmp_path))
    assert Reach.MAYBE is reach("torch", str(tmp_path / "missing.py"), str(tmp_path))
    assert Reach.MAYBE is reach("torch", str(tmp_path / "chain0.py"), str(tmp_path))
