"""
Import of test modules in a worker: from the same files as in pytest, with rewritten assertions.

Rules of this file: a module has the same name in `sys.modules` as in pytest's process, in any
import mode. So objects can be sent by name. Only the part of pytest's configuration that assertions
need is loaded. No plugins run.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from attrs import frozen

_WITHOUT = [
    part
    for name in "cacheprovider doctest faulthandler junitxml legacypath nose pastebin setuponly setupplan stepwise "
    "threadexception unittest unraisableexception".split()
    for part in ("-p", f"no:{name}")
]
"""Parts of pytest that assertions do not need and whose imports would take time."""
_files: dict[str, ModulePlace] = {}
_config: Any = None


@frozen
class ModulePlace:
    """Files of a module."""

    file: str
    """Empty for a package without an ``__init__.py``."""
    folders: tuple[str, ...] = ()
    """Folders of a package."""
    is_rewritten: bool = False


@frozen
class Setting:
    """Part of pytest's configuration that assertions need."""

    root: str
    ini: str
    """Text of a configuration file."""
    verbosity: int


class _Finder:
    """Import finder for the modules that pytest has imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = _files.get(name)
        if place is None:
            return None

        # A namespace package has folders, and no file.
        if not place.file:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = list(place.folders)
            return spec

        folders = list(place.folders) if place.folders else None
        loader = _hook() if place.is_rewritten else None
        return importlib.util.spec_from_file_location(
            name, place.file, loader=loader, submodule_search_locations=folders
        )


def _hook() -> Any:
    from _pytest.assertion.rewrite import assertstate_key

    state = _config.stash.get(assertstate_key, None)
    return None if state is None else state.hook


def prepare(setting: Setting, modules: Mapping[str, ModulePlace]) -> None:
    """Make *modules* importable, and set up pytest's explanations of assertions."""
    if _config is None:
        _configure(setting)
    _files.update(modules)
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        # First, because the search path may have another file of the same name.
        sys.meta_path.insert(0, _Finder())


def _configure(setting: Setting) -> None:
    global _config
    from _pytest._io import TerminalWriter
    from _pytest.assertion import util
    from _pytest.config import Config

    # These variables would load the user's options and plugins.
    names = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    former = {name: os.environ.pop(name, None) for name in names}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    path = list(sys.path)
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(setting.ini)
        file.flush()
        args = ["-c", file.name, "--rootdir", setting.root, "--noconftest", *_WITHOUT]
        try:
            _config = Config.fromdictargs({}, [*args, *["-v"] * setting.verbosity, *["-q"] * -setting.verbosity])
        finally:
            sys.path[:] = path
            del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
            os.environ.update({name: value for name, value in former.items() if value is not None})

    # pytest up to 8 asks the terminal writer for colours: this one has none, even with FORCE_COLOR.
    writer = TerminalWriter(io.StringIO())
    writer.hasmarkup = False
    _config.pluginmanager.register(SimpleNamespace(_tw=writer), "terminalreporter")

    def explained(op: str, left: object, right: object) -> str | None:
        return _explained(op, left, right)

    util._reprcompare = explained
    util._config = _config


def _explained(op: str, left: object, right: object) -> str | None:
    """Return pytest's explanation of a failed comparison, for the message of the assertion."""
    from _pytest.assertion import truncate

    # Later versions of pytest have truncated the lines already.
    shorten = getattr(truncate, "truncate_if_required", None)
    for lines in _config.hook.pytest_assertrepr_compare(config=_config, op=op, left=left, right=right):
        if lines:
            lines = shorten(lines, SimpleNamespace(config=_config)) if shorten is not None else lines
            # As in pytest: ~ marks a continued line, and the text is formatted with %.
            return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")

    return None


def register(modules: Sequence[str]) -> None:
    """Register the hook ``pytest_assertrepr_compare`` of each of *modules*."""
    for name in modules:
        module = importlib.import_module(name)
        if not _config.pluginmanager.has_plugin(name):
            explains: Any = ModuleType(name)
            explains.pytest_assertrepr_compare = module.pytest_assertrepr_compare
            _config.pluginmanager.register(explains, name)


def configuration() -> Any:
    return _config
