"""The table of torch's names and ours: complete, true, and everything in it documented and typed."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import elasticlib

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="not installed: torch")

ROOT = pathlib.Path(elasticlib.__file__).parents[1]
TABLE = ROOT / "elasticlib" / "docs" / "names.md"
ROW = re.compile(r"\| `(torch[\w.]+)` \| (?:`(elasticlib[\w.]+)`|(-)) \| (\S.*\S) \|")
ABSENT = "-"
OF_TORCH = ("torch.distributed.elastic", "torch.distributed.launcher")
PARTS = (
    "distributed/elastic",
    "distributed/launcher",
    "distributed/run.py",
    "distributed/launch.py",
    "distributed/argparse_util.py",
    "numa/binding.py",
)


@functools.cache
def table() -> dict[str, tuple[str, str]]:
    """torch's name -> (ours, or `ABSENT`; what differs)."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            row = ROW.fullmatch(line)
            assert row is not None, f"{line!r} is no row of the table"
            assert row[1] not in found, f"{row[1]} is there twice"
            found[row[1]] = row[2] or row[3], row[4]
    return found


OURS = sorted({name for name, _ in table().values()} - {ABSENT})
MODULES = sorted({name.rpartition(".")[0] for name in OURS})


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_table_can_be_imported(module: str) -> None:
    made = importlib.import_module(module)

    wanted = [name.rpartition(".")[2] for name in OURS if name.rpartition(".")[0] == module]

    assert [] == [name for name in wanted if not hasattr(made, name)]


def command() -> str:
    """The command that moves a program's imports, as the table says it."""
    found = re.search(r"sed -i -E '(s/torch[^']*)' FILES", TABLE.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def test_moving_is_one_command(tmp_path: pathlib.Path) -> None:
    """Tried on every name of the table, and on what must stay."""
    program = tmp_path / "program.py"
    program.write_text("\n".join([*table(), "torch.distributed.launching", "torch.distributed.run_all"]))

    done = subprocess.run(["sed", "-E", command(), program], capture_output=True, text=True, check=True)

    moved = done.stdout.splitlines()
    assert ["torch.distributed.launching", "torch.distributed.run_all"] == moved[-2:]
    for (ours, _), name in zip(table().values(), moved, strict=False):
        assert ours in (name.replace("torch.numa", "elasticlib.numa"), ABSENT)


@pytest.mark.parametrize("document", [ROOT / "README.md", ROOT / "elasticlib/docs/migration.md"])
def test_other_documents_name_the_same_command(document: pathlib.Path) -> None:
    assert command() in document.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "elasticlib/elastic").rglob("*.py")), ids=lambda path: str(path.parent.name)
)
def test_torchs_paths_hold_the_same_objects_as_our_own_packages(path: pathlib.Path) -> None:
    """Nothing is defined there."""
    kinds = {type(node) for node in ast.parse(path.read_text(encoding="utf-8")).body}

    assert kinds <= {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.If}


def test_missing_names_are_the_exception_and_have_a_reason() -> None:
    absent = {name: reason for name, (ours, reason) in table().items() if ours == ABSENT}

    assert len(absent) <= 3
    assert all(len(reason) > 20 for reason in absent.values())


def torch_names(*, of_values: bool = False) -> Iterator[str]:
    """All public names of torch's launcher, read from its sources: some cannot be imported here."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    root = pathlib.Path(spec.origin).parent
    for part in PARTS:
        place = root / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            inside = path.relative_to(root.parent).with_suffix("")
            module = ".".join(inside.parts).removesuffix(".__init__")
            if not any(piece.startswith("_") for piece in module.split(".")):
                tree = ast.parse(path.read_text())
                yield from (f"{module}.{name}" for name in public(tree, path.stem == "__init__"))
                yield from (f"{module}.{name}" for name in values(tree) if of_values)


def public(tree: ast.Module, is_package: bool) -> Iterator[str]:
    """The names in ``__all__``, else all functions and classes; of a package also those from its own modules."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            yield from ast.literal_eval(node.value)
            return
    for node in [*tree.body, *(each for part in tree.body if isinstance(part, ast.If) for each in part.orelse)]:
        names = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif (
            is_package and isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(OF_TORCH))
        ):
            names = [alias.asname or alias.name for alias in node.names]
        yield from (name for name in names if not name.startswith("_"))


@pytest.mark.slow
def test_the_table_lacks_no_name_of_torch() -> None:
    wanted = set(torch_names())

    assert len(wanted) > 150
    assert [] == sorted(wanted - table().keys())


def values(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives to values; not all of them are meant for others."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


OWN_WAY = {
    "DynamicRendezvousHandler": "made by from_backend, in torch too: its constructor takes torch's private classes",
    "EtcdRendezvous": "the phases of torch's protocol are methods there",
}
"""Classes whose constructor or methods are not torch's, as the table says of them."""
NEED_PYTHON_ETCD = {"torch.distributed.elastic.rendezvous.etcd_rendezvous_backend"}
"""Modules of torch that cannot be imported without a package whose last release is of 2017."""


def parameters(each: Any) -> list[str]:
    return list(inspect.signature(each).parameters)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", sorted({name.rpartition(".")[0] for name in table()} - NEED_PYTHON_ETCD))
def test_parameters_and_methods_are_torchs(module: str) -> None:
    """In torch's order, by torch's names; what is ours alone comes after."""
    theirs = importlib.import_module(module)
    strange = []
    for name, (ours, _) in table().items():
        if not name.startswith(f"{module}.") or (last := name.removeprefix(f"{module}.")) in OWN_WAY or "." in last:
            continue
        if ours == ABSENT:
            continue
        one = getattr(theirs, last)
        other = getattr(importlib.import_module(ours.rpartition(".")[0]), last)
        strange += [f"{last}{missing}" for missing in differences(one, other)]

    assert [] == strange


def differences(one: Any, other: Any) -> Iterator[str]:
    """Yield the signatures and names of torch's *one* that our *other* does not have."""
    if not callable(one) or (inspect.isclass(one) and issubclass(one, (str, int))):
        return
    with contextlib.suppress(ValueError):  # an alias of types has no signature
        wanted = parameters(one)
        if wanted != parameters(other)[: len(wanted)]:
            yield f"({', '.join(wanted)})"
    for name in dir(one) if inspect.isclass(one) else ():
        if name.startswith("_"):
            continue
        if not hasattr(other, name) and name not in getattr(other, "__annotations__", {}):
            yield f".{name}"
        elif inspect.isfunction(method := getattr(one, name)):
            wanted = parameters(method)
            if wanted != parameters(getattr(other, name))[: len(wanted)]:
                yield f".{name}({', '.join(wanted)})"


@pytest.mark.slow
def test_the_table_has_no_name_that_torch_lacks() -> None:
    assert [] == sorted(table().keys() - set(torch_names(of_values=True)))


@pytest.mark.slow
def test_importing_the_modules_of_the_table_does_not_import_torch() -> None:
    code = (
        f"import importlib, sys\nfor name in {MODULES!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)

    assert "False" == done.stdout.strip()


def public_modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(elasticlib.__path__, "elasticlib."):
        if not any(piece.startswith("_") for piece in found.name.split(".")):
            yield found.name


def callables(owner: Any, module: str) -> Iterator[tuple[str, Any]]:
    """Public functions and classes of a module, or of a class, and what is public in these."""
    listed = getattr(owner, "__all__", None)
    for name in listed or [name for name in vars(owner) if not name.startswith("_")]:
        each = inspect.getattr_static(owner, name, None) if inspect.isclass(owner) else getattr(owner, name)
        if isinstance(each, (staticmethod, classmethod)):
            each = each.__func__
        if isinstance(each, (property, functools.cached_property)):
            each = each.fget if isinstance(each, property) else each.func
        home = str(getattr(each, "__module__", ""))
        ours = home.startswith("elasticlib") if listed or inspect.isclass(owner) else home == owner.__name__
        if isinstance(each, types.FunctionType) and ours:
            yield f"{module}.{name}", each
        elif inspect.isclass(each) and ours and not inspect.isclass(owner):
            yield f"{module}.{name}", each
            yield from callables(each, f"{module}.{name}")


def documented(name: str, each: Any, owner: type | None) -> bool:
    """Return whether *each* has a docstring: its own, or that of the method that it overrides."""
    bases = owner.__mro__[1:] if owner is not None else ()
    return bool(each.__doc__) or any(getattr(base.__dict__.get(name), "__doc__", None) for base in bases)


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(public_modules()))
def test_public_names_have_a_docstring_and_types(module: str) -> None:
    if module == "elasticlib.__main__":
        return
    made = importlib.import_module(module)
    silent, untyped = [], []
    classes = {name: each for name, each in callables(made, module) if inspect.isclass(each)}
    for name, each in callables(made, module):
        owner = classes.get(name.rpartition(".")[0])
        if not documented(name.rpartition(".")[2], each, owner):
            silent.append(name)
        if isinstance(each, types.FunctionType):
            parameters = list(inspect.signature(each).parameters)
            bound = owner is not None and parameters[:1] in (["self"], ["cls"])
            wanted = {*(parameters[1:] if bound else parameters), "return"} - {"_"}
            untyped += [f"{name}: {part}" for part in wanted - each.__annotations__.keys()]

    assert made.__doc__
    assert ([], []) == (silent, untyped)
