"""Promises to a user who installs: dependencies, commands and the README's two lines."""

from __future__ import annotations

import ast
import configparser
import importlib
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable

import elasticlib
import elasticlib.run
from elasticlib.spec import LaunchConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMPORT_NAMES = {"typing-extensions": "typing_extensions", "nvidia-ml-py": "pynvml"}
PARTS = {"_pytest": "pytest"}
"""Packages that come with another one."""


def settings() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    return parsed


def listed(section: str, option: str) -> set[str]:
    return {re.split(r"[<>=~!\[; ]", line)[0] for line in settings()[section][option].split("\n") if line}


def readme_lines(part: str) -> list[str]:
    return [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if part in line]


def imported_by(paths: Iterable[pathlib.Path]) -> set[str]:
    """Packages of others that these files import, wherever in the file."""
    imported = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    imported = {PARTS.get(name, name) for name in imported}
    return imported - sys.stdlib_module_names - {"elasticlib"}


def test_imported_packages_are_the_required_ones() -> None:
    tools = set((ROOT / "elasticlib" / "testing").rglob("*.py"))
    third_party = imported_by(set((ROOT / "elasticlib").rglob("*.py")) - tools)

    required = {IMPORT_NAMES.get(name, name) for name in listed("options", "install_requires")}
    optional = {name for extra in ("completion", "gpu", "progress") for name in listed("options.extras_require", extra)}

    assert required | {IMPORT_NAMES.get(name, name) for name in optional - {""}} == third_party
    assert listed("options.extras_require", "pytest") == imported_by(tools) - required


def test_every_folder_of_sources_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "elasticlib").rglob("*.py")} - {ROOT / "elasticlib" / "docs"}

    assert [] == sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists())


def test_package_is_marked_as_typed_and_includes_its_guides() -> None:
    assert {"py.typed", "docs/*.md", "docs/*.png", "docs/*.svg"} == listed("options.package_data", "elasticlib") - {""}
    assert (ROOT / "elasticlib" / "py.typed").exists()
    guides = "fork_server frameworks many_nodes migration names notebooks testing troubleshooting"
    engines = "engines kubernetes ray slurm ssh"
    pages = f"architecture configuration contributing figures index reference {guides} {engines}"
    assert {f"{page}.md" for page in pages.split()} == {path.name for path in (ROOT / "elasticlib/docs").glob("*.md")}


def test_the_console_script_is_the_command_line() -> None:
    (line,) = listed("options.entry_points", "console_scripts") - {""}
    target = settings()["options.entry_points"]["console_scripts"].split("=")[1].strip()
    module, _, name = target.partition(":")

    assert "elasticrun" == line
    assert elasticlib.run.main is getattr(importlib.import_module(module), name)


def test_the_constraints_pin_one_torch() -> None:
    pins = (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8").split()

    assert ["torch==2.13.0"] == pins


def test_the_package_knows_its_version() -> None:
    assert settings()["metadata"]["version"] == elasticlib.__version__


def test_the_version_has_its_place_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert "\n## Unreleased" in changelog or f"\n## {settings()['metadata']['version']}" in changelog


def test_the_readme_installs_and_tests_in_one_command() -> None:
    (command,) = readme_lines("-m pytest")

    assert "-c tests/constraints.txt" in command
    assert "-e '.[dev]'" in command
    assert command.startswith("python3 -m venv .venv && ")
    assert command.endswith(" && .venv/bin/python -m pytest")


def test_ci_runs_the_readmes_test_command_and_no_other() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    assert """test_command=$(grep -m1 'bin/python -m pytest' README.md)""" in script
    assert 1 == len(re.findall(r"\bpytest\b", script))
    # Its set-up once, and its tests in three parts, which together are all.
    assert """set_up=${test_command% && *}\n""" in script and 'eval "$set_up"' in script
    assert "tests=${test_command##* && }\n" in script
    assert 'in_background pure 19 "${pure[@]}"\n' in script
    assert 'in_background company 10 "${named[@]/#/--ignore=}"\n' in script
    assert 'named=("${pure[@]}" "${jobs[@]}")\n' in script
    assert 'eval "$tests ${jobs[*]}" || status=$?\n' in script
    assert 'eval "nice -n $level $tests $*"' in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_main_job_of_the_readme_requests_what_the_readme_states() -> None:
    (command,) = readme_lines(".venv/bin/elasticrun ")
    set_up, _, run = command.partition(".venv/bin/elasticrun ")

    request = elasticlib.run.parse(shlex.split(run), {})

    assert "-c tests/constraints.txt" in set_up
    assert (
        LaunchConfig(
            nproc_per_node=2,
            max_restarts=1,
            role="default",
            run_id=request.config.run_id,
            logs_specs=request.config.logs_specs,
        )
        == request.config
    )
    assert "notebooks/train_digits.py" == request.entrypoint
    assert (ROOT / "notebooks" / "train_digits.py").is_file()
    assert ("--fail-rank", "1", "--fail-epoch", "3") == request.args[:4]
