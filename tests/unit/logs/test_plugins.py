"""Log specifications of other packages: found by name, checked, and made as their class expects."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import ConfigError, LogDirError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.logs._plugins import known_logs_specs, load_logs_specs
from elasticlib.spec import LogsSpecs, Std

Install = Callable[..., None]

OWN = """
from elasticlib.logs import DefaultLogsSpecs

class Own(DefaultLogsSpecs):
    pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package of one module, which declares log specifications as name=attribute."""
    before = set(sys.modules)

    def install(package: str, code: str = OWN, **names: str) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {value}" for name, value in names.items()]
        (info / "entry_points.txt").write_text("\n".join(["[torchrun.logs_specs]", *lines]) + "\n")
        (folder / f"{package}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(str(folder))

    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_plugin_is_found_by_name_and_made_with_the_launchers_options(install: Install, tmp_path: Path) -> None:
    install("ownlogs", own_layout="ownlogs:Own")

    specs = load_logs_specs("own-layout")(
        log_dir=str(tmp_path), redirects=Std.OUT, tee={1: Std.ALL}, local_ranks_filter=[0]
    )

    kind = importlib.import_module("ownlogs").Own
    assert type(specs) is kind
    assert kind(str(tmp_path), Std.OUT, {1: Std.ALL}, {0}) == specs


def test_an_unknown_name_is_refused_with_the_known_ones(install: Install) -> None:
    install("ownlogs", own_layout="ownlogs:Own")

    with pytest.raises(ValueError, match=r"logs_specs='mine' is not an installed.*give one of .*own-layout"):
        load_logs_specs("mine")
    assert {"default", "own-layout"} <= set(known_logs_specs())


def test_the_default_is_ours_though_torch_declares_its_own(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("torch", "raise ImportError('not needed')", default="torch.distributed.elastic:DefaultLogsSpecs")

    assert load_logs_specs("default") is DefaultLogsSpecs
    assert [] == caplog.records


def test_first_of_two_packages_with_one_name_wins_and_both_are_named(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("later", same="later:Own")
    install("sooner", same="sooner:Own")

    with caplog.at_level(logging.WARNING):
        specs = load_logs_specs("same")()

    assert "sooner" == type(specs).__module__
    assert "logs_specs='same': sooner:Own of sooner is used, not later:Own of later" in caplog.text


def test_another_packages_default_overrides_ours_with_a_warning(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("torch", "", default="torch.distributed.elastic:DefaultLogsSpecs")
    install("theirs", default="theirs:Own")

    with caplog.at_level(logging.WARNING):
        specs = load_logs_specs("default")()

    assert "theirs" == type(specs).__module__
    assert "theirs:Own of theirs is used, not elasticlib's own" in caplog.text


@pytest.mark.parametrize(
    ("code", "value", "reason"),
    [
        ("import nowhere_to_be_found", "broken:Own", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("1 / 0", "broken:Own", "ZeroDivisionError"),
        ("", "broken:Own", "has no attribute 'Own'"),
        ("Own = 'text'", "broken:Own", "is 'text', not a class"),
        ("class Own: pass", "broken:Own", "broken.Own lacks reify, root_log_dir"),
        (
            "from elasticlib.spec import LogsSpecs\nclass Own(LogsSpecs): pass",
            "broken:Own",
            "does not define reify, root_log_dir",
        ),
    ],
)
def test_a_plug_in_that_is_of_no_use_is_refused_with_the_reason(
    install: Install, code: str, value: str, reason: str
) -> None:
    install("broken", code, mine=value)

    with pytest.raises(ConfigError, match=reason) as caught:
        load_logs_specs("mine")
    assert "logs_specs='mine'" in str(caught.value)


NARROW = """
class Own:
    root_log_dir = ""
    def __init__(self, log_dir): pass
    def reify(self, envs): pass
"""
PICKY = """
from elasticlib.logs import DefaultLogsSpecs

class Own(DefaultLogsSpecs):
    def __init__(self, **wishes):
        raise NotADirectoryError("is a file")
"""


@pytest.mark.parametrize(
    ("code", "error", "reason"),
    [
        (NARROW, ConfigError, r"own\.Own cannot be created .*TypeError.*redirects"),
        (PICKY, LogDirError, r"own\.Own cannot be created with log_dir='x'"),
        ("def Own(**wishes): return 7", ConfigError, r"builtins\.int lacks reify, root_log_dir"),
    ],
    ids=["other keywords", "refuses the folder", "makes something else"],
)
def test_specifications_that_cannot_be_made_are_refused_with_the_reason(
    install: Install, code: str, error: type[ConfigError], reason: str
) -> None:
    install("own", code, mine="own:Own")

    with pytest.raises(error, match=reason):
        load_logs_specs("mine")(log_dir="x")


def test_a_function_that_makes_specifications_will_do(install: Install) -> None:
    install(
        "maker",
        "from elasticlib.logs import DefaultLogsSpecs\ndef make(**k): return DefaultLogsSpecs(**k)",
        m="maker:make",
    )

    assert load_logs_specs("m")(log_dir="/logs") == DefaultLogsSpecs("/logs")


def test_property_that_is_not_ready_before_first_round_is_not_read(install: Install) -> None:
    install(
        "later",
        """
        from elasticlib.logs import DefaultLogsSpecs

        class Own(DefaultLogsSpecs):
            root_log_dir = property(lambda self: 1 / 0)
        """,
        mine="later:Own",
    )

    assert isinstance(load_logs_specs("mine")(), LogsSpecs)


ANOTHER_LAUNCHER = """
import enum

class Std(enum.IntFlag):
    NONE, OUT, ERR, ALL = 0, 1, 2, 3

class LogsSpecs:
    root_log_dir = "/theirs"
    def __init__(self, log_dir=None, redirects=Std.NONE, tee=Std.NONE, local_ranks_filter=None):
        self.wishes = {"redirects": redirects, "tee": tee}
        assert isinstance(redirects, (Std, dict))
        assert isinstance(tee, (Std, dict))
    def reify(self, envs):
        pass
"""


def test_a_class_of_another_launcher_gets_that_launchers_kind_of_streams(install: Install) -> None:
    install("another", ANOTHER_LAUNCHER)
    install("plugin", "import another\nclass Own(another.LogsSpecs): pass", mine="plugin:Own")

    specs: Any = load_logs_specs("mine")(redirects=Std.OUT, tee={3: Std.ALL})

    theirs = importlib.import_module("another").Std
    assert {"redirects": theirs.OUT, "tee": {3: theirs.ALL}} == specs.wishes
    assert type(specs.wishes["redirects"]) is type(specs.wishes["tee"][3]) is theirs
