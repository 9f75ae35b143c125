"""Examples in the guides: commands parse, configurations can be made, and links have a target."""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Iterator

import pytest

import elasticlib.run
from elasticlib import LaunchConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "elasticlib" / "docs"
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def blocks(path: pathlib.Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Return the arguments of each ``elasticrun`` command of the guides on many nodes."""
    found = []
    for path in (ROOT / "README.md", DOCS / "many_nodes.md"):
        for block in blocks(path, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                _, name, rest = line.rpartition("elasticrun ")
                if name and "--nnodes" in rest:
                    found.append(rest)
    return found


@pytest.mark.parametrize("command", commands())
def test_a_command_for_many_nodes_is_one_that_the_command_line_takes(command: str) -> None:
    request = elasticlib.run.parse(shlex.split(command), {})

    assert "train.py" == request.entrypoint
    assert 2 == request.config.min_nodes
    assert "c10d" == request.config.rdzv_backend
    assert request.config.rdzv_endpoint.endswith(":29400")
    assert request.config.run_id


def test_each_place_that_shows_a_command_for_many_nodes_is_found() -> None:
    """README and two machines by hand; those of engines run in tests of their pages."""
    assert 2 == len(commands())


@pytest.mark.parametrize("path", [ROOT / "README.md", DOCS / "many_nodes.md"], ids=lambda path: path.name)
def test_a_configuration_for_many_nodes_can_be_made(path: pathlib.Path) -> None:
    shown = re.findall(r"`(LaunchConfig\(2, .*?\))`", path.read_text(encoding="utf-8"))

    assert shown
    for text in shown:
        assert 2 == eval(text, {"LaunchConfig": LaunchConfig}).min_nodes


def anchor(heading: str) -> str:
    """A heading's name in links, as Markdown viewers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_links_between_the_guides_lead_somewhere(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")

    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, part = target.partition("#")
        aim = (path.parent / file).resolve() if file else path
        assert aim.exists(), target
        if part:
            headings = re.findall(r"^#+ (.*)$", aim.read_text(encoding="utf-8"), re.MULTILINE)
            assert part in map(anchor, headings), target
