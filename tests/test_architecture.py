"""The architecture, held by reading the sources: arrows point down, the core is pure, modules stay small."""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOUSE = ROOT / "elasticlib"
FILES = sorted(path.relative_to(HOUSE).as_posix() for path in HOUSE.rglob("*.py") if path.parent.name != "docs")

LAYERS = [
    "_lazy",
    "_wording",
    "_untrusted",
    "stacks",
    "notebook._front_end",
    "notebook._tracebacks",
    "notebook._marks",
    "_clock",
    "errors",
    "processes",
    "_times",
    "utils",
    "numa",
    "_rules",
    "spec",
    "_torch_config",
    "engines",
    "state",
    "records",
    "helpers",
    "metrics",
    "events",
    "rendezvous._names",
    "rendezvous.protocol",
    "rendezvous._rdzv_options",
    "rendezvous.net",
    "rendezvous.coordinator",
    "rendezvous._membership",
    "rendezvous._node_job",
    "rendezvous.serving._requests",
    "rendezvous.stores",
    "rendezvous.stores.etcd",
    "rendezvous.node",
    "rendezvous.sidecar",
    "rendezvous._own_token",
    "rendezvous.serving",
    "rendezvous._choice",
    "rendezvous._command",
    "rendezvous.handlers",
    "rendezvous.third_party",
    "rendezvous._open",
    "rendezvous",
    "rendezvous._opening",
    "logs",
    "notebook",
    "timer",
    "workers._environment",
    "workers.child",
    "preload",
    "workers.spawner",
    "workers",
    "agent",
    "job",
    "remote",
    "launch",
    "remote._node",
    "pools",
    "testing.process_state",
    "testing.ranks",
    "testing",
    "testing.pytest_plugin.rank",
    "testing.pytest_plugin",
    "argparse_util",
    "cli",
    "run",
    "remote._batch_node",
    "cli._legacy",
    "launcher",
    "elastic",
    "__main__",
    "__init__",
]
"""From the ground up: a module imports from its own layer and from those before it."""

PURE = [
    "engines/_placement.py",
    "engines/_filling.py",
    "engines/_agent_frames.py",
    "engines/_hostfile.py",
    "engines/_protocol.py",
    "engines/_supervisor.py",
    "engines/_kept_places.py",
    "engines/_ray_decisions.py",
    "engines/_slurm_options.py",
    "engines/_slurm_script.py",
    "remote/_batch_decision.py",
    "remote/_whole_lines.py",
    "agent/_end_notice.py",
    "engines/_host_list.py",
    "workers/child/_start_spec.py",
    "_wording.py",
    "stacks/_frames.py",
    "stacks/_rank_text.py",
    "workers/child/_loaded.py",
    "notebook/_marks.py",
    "_untrusted.py",
    "_times.py",
    "helpers/_helper_liveness.py",
    "rendezvous/coordinator/_coordinator.py",
    "rendezvous/coordinator/_state.py",
    "rendezvous/coordinator/_causes.py",
    "rendezvous/coordinator/_common_stop.py",
    "rendezvous/coordinator/_departures.py",
    "rendezvous/coordinator/_replacements.py",
    "rendezvous/coordinator/_round_end.py",
    "rendezvous/coordinator/_finalizing.py",
    "rendezvous/coordinator/_node_liveness.py",
    "rendezvous/coordinator/_places.py",
    "rendezvous/protocol/_exchange.py",
    "rendezvous/sidecar/_contact.py",
    "rendezvous/stores/_candidacy.py",
    "rendezvous/coordinator/_farewell.py",
    "rendezvous/coordinator/_garbage.py",
    "rendezvous/coordinator/_handover.py",
    "rendezvous/protocol/_heartbeats_read.py",
    "rendezvous/protocol/_progress.py",
    "rendezvous/protocol/_timing.py",
    "rendezvous/protocol/_reading.py",
    "rendezvous/serving/_requests.py",
    "rendezvous/serving/_job_table.py",
    "rendezvous/serving/_settings.py",
    "rendezvous/stores/_keys.py",
    "rendezvous/stores/_state_document.py",
    "rendezvous/coordinator/_rank_order.py",
    "rendezvous/protocol/_codec.py",
    "rendezvous/node/_session_liveness.py",
    "rendezvous/coordinator/_outbox.py",
    "rendezvous/protocol/_shortening.py",
    "rendezvous/protocol/_messages.py",
    "rendezvous/_membership.py",
    "rendezvous/protocol/_operations.py",
    "rendezvous/node/_identity.py",
    "rendezvous/node/_session_memory.py",
    "rendezvous/node/_staying.py",
    "rendezvous/node/_own_heartbeats.py",
    "rendezvous/node/_node_outbox.py",
    "rendezvous/node/_session.py",
    "rendezvous/node/_session_events.py",
    "rendezvous/coordinator/_server.py",
    "rendezvous/coordinator/_server_events.py",
    "rendezvous/coordinator/_incoming.py",
    "rendezvous/sidecar/_launcher_watch.py",
    "rendezvous/_rdzv_options.py",
    "rendezvous/_node_job.py",
    "rendezvous/net/_endpoint.py",
    "rendezvous/_choice.py",
    "rendezvous/_command.py",
    "rendezvous/coordinator/_commands.py",
    "numa/_numa_options.py",
    "numa/_cpus.py",
    "workers/_environment.py",
    "preload/_reads.py",
    "preload/_import_watch.py",
    "logs/_layout.py",
    "logs/_lines.py",
    "logs/_bar_rows.py",
    "logs/_bar_text.py",
    "agent/_policy.py",
    "agent/_repeats.py",
    "notebook/_displays.py",
    "job/_gpu_shares.py",
    "job/_results.py",
    "job/_status.py",
    "timer/_timer_table.py",
    "testing/ranks/_rank_call.py",
    "testing/ranks/_rank_options.py",
    "testing/ranks/_blocked.py",
    "testing/ranks/_process_shares.py",
]
DATA = ("errors", "spec", "state", "records")
"""Layers of plain values, which the pure core is made of too."""
MOST_MODULES = 21
IMPURE_MODULES = frozenset(
    "asyncio cloudpickle concurrent ctypes datetime fcntl io logging mmap multiprocessing numpy os pathlib pickle "
    "random secrets select selectors shutil signal socket subprocess sys tempfile threading time torch uuid "
    "warnings".split()
)
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "__import__"})
PURE_PARTS_OF_OS = frozenset({"os.devnull", "os.fspath", "os.path.basename", "os.path.dirname", "os.path.join"})
"""They compute on text and touch nothing."""

UNPICKLING = frozenset({"load", "loads", "Unpickler"})
UNPICKLERS = frozenset({"pickle", "cloudpickle", "marshal", "torch", "shelve", "dill"})
MAY_UNPICKLE = {
    "remote/_call.py": "a call of the client that started this agent, and values of the client's own agents",
    "workers/child/_function.py": "the function that the launcher sends to its own worker, with definitions",
    "workers/child/_result_pickles.py": "an exception of this process, or that our own worker left in its memory file",
    "testing/ranks/_rank_session.py": "what the functions of tests returned in our own workers",
    "testing/ranks/_coverage.py": "settings that pytest's process sends to its own workers",
    "workers/_failure.py": "the return values that our own workers left in their memory files",
}
TORCHS_OWN_LAUNCHER = tuple(f"torch.distributed.{name}" for name in ("elastic", "launcher", "run", "launch"))


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute of a name, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def statements(module: ast.AST, *, of_types: bool) -> Iterator[ast.AST]:
    """All parts of *module*; without *of_types*, not those that type checkers alone read."""
    for node in ast.iter_child_nodes(module):
        if of_types or not (isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")):
            yield node
            yield from statements(node, of_types=of_types)


@functools.cache
def imports(file: str, *, of_types: bool = True) -> tuple[str, ...]:
    """The full name of everything that *file* imports, wherever in the file the import stands."""
    return tuple(_imports(file, of_types))


def _imports(file: str, of_types: bool) -> Iterator[str]:
    package = ["elasticlib", *pathlib.PurePosixPath(file).parent.parts]
    for node in statements(tree(HOUSE / file), of_types=of_types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, node.module] if node.module else start)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer(file: str) -> str:
    """The longest name in `LAYERS` that the file's own begins with."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    while name not in LAYERS:
        assert "." in name, f"{file} belongs to no layer"
        name = name.rpartition(".")[0]
    return name


@functools.cache
def offered(file: str) -> dict[str, str]:
    """Return {name: the full name of the module that defines it} for a package's ``__init__``."""
    found = (node for node in statements(tree(HOUSE / file), of_types=True) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: node.module or "" for node in found for alias in node.names}


@functools.cache
def module_of(name: str) -> str | None:
    """Return the file that *name*, of a module or of something in one, is defined in; None for other packages'."""
    first, _, rest = name.partition(".")
    while first == "elasticlib" and rest:
        base = rest.replace(".", "/")
        if f"{base}.py" in FILES:
            return f"{base}.py"
        if f"{base}/__init__.py" in FILES:
            own = name.removeprefix(f"elasticlib.{rest}").removeprefix(".").partition(".")[0]
            where = offered(f"{base}/__init__.py").get(own, "")
            return module_of(where) if where.startswith(f"elasticlib.{rest}.") else f"{base}/__init__.py"
        rest = rest.rpartition(".")[0]
    return "__init__.py" if first == "elasticlib" else None


@functools.cache
def imported_layers(file: str) -> set[str]:
    """Return the layers of the modules whose names *file* imports, also where these come through an interface."""
    if file.endswith("__init__.py"):
        return set()  # an interface is no user of what it offers
    return {layer(found) for name in imports(file) if (found := module_of(name)) is not None}


@functools.cache
def calls(file: str) -> frozenset[str]:
    return frozenset(dotted(node.func) for node in ast.walk(tree(HOUSE / file)) if isinstance(node, ast.Call))


@functools.cache
def attributes(file: str) -> frozenset[str]:
    """``a.b.c`` for each that *file* uses of a name, ``c`` for one of anything else."""
    found = (node for node in ast.walk(tree(HOUSE / file)) if isinstance(node, ast.Attribute))
    return frozenset(dotted(node) or node.attr for node in found)


def test_arrows_point_down() -> None:
    upwards = {
        file: higher
        for file in FILES
        if (higher := {each for each in imported_layers(file) if LAYERS.index(each) > LAYERS.index(layer(file))})
    }

    assert {} == upwards


def test_the_facade_is_used_inside_for_its_place_on_disk_only() -> None:
    assert {} == {file: names for file in FILES if (names := used_through_the_facade(file))}


def used_through_the_facade(file: str) -> set[str]:
    imported = {name.removeprefix("elasticlib.") for name in imports(file) if name.startswith("elasticlib.")}

    through_facade = {
        name for name in attributes(file) if name.startswith("elasticlib.") and not name.startswith("elasticlib.__")
    }

    return {name for name in through_facade if name.split(".")[1] not in {each.split(".")[0] for each in imported}}


@pytest.mark.parametrize("file", PURE)
def test_the_pure_core_imports_nothing_that_reads_or_changes_the_world(file: str) -> None:
    reached = {name.split(".")[0] for name in imports(file, of_types=False)} & IMPURE_MODULES
    if {name for name in attributes(file) if name.startswith("os.")} - {"os.path"} <= PURE_PARTS_OF_OS:
        reached -= {"os"}

    assert set() == reached


@pytest.mark.parametrize("file", PURE)
def test_the_pure_core_imports_only_data_and_itself(file: str) -> None:
    """By way of a package's interface, too, it takes only what the pure part of that package defines."""
    own = {found for name in imports(file) if (found := module_of(name)) is not None}

    assert set() == {found for found in own if found not in PURE and layer(found) not in DATA}


@pytest.mark.parametrize("file", PURE)
def test_the_pure_core_opens_and_prints_nothing(file: str) -> None:
    assert set() == set(calls(file)) & IMPURE_CALLS


BRANCHES = (*(ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert, ast.match_case),)
MOST_DENSE_FUNCTIONS, MOST_DENSE_FILES = 0, 0
"""Limits for functions and modules that read as if compressed; lower them, never raise them."""


def branches(node: ast.AST) -> int:
    """Return how often *node* branches; ``a and b`` does once."""
    of_operators = sum(len(each.values) - 1 for each in ast.walk(node) if isinstance(each, ast.BoolOp))
    return of_operators + sum(isinstance(each, BRANCHES) for each in ast.walk(node))


def functions(file: str) -> list[tuple[str, int, int]]:
    """Return (name, branches, lines without the docstring) of each function in *file*."""
    found = []
    for node in ast.walk(tree(HOUSE / file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            found.append((node.name, branches(node), lines))
    return found


def test_no_more_functions_branch_every_second_line() -> None:
    """Give a predicate a name, return early, or make a table of it; a line that was folded is no gain."""
    dense = [
        f"{file}: {name}"
        for file in FILES
        for name, count, lines in functions(file)
        if lines >= 10 and 2 * count >= lines
    ]

    assert len(dense) <= MOST_DENSE_FUNCTIONS


def test_no_more_modules_are_dense() -> None:
    """Those with more than 40 branches in 100 lines of functions."""
    dense = []
    for file in FILES:
        counted = functions(file)
        lines = sum(each[2] for each in counted)
        if lines >= 60 and 100 * sum(each[1] for each in counted) > 40 * lines:
            dense.append(file)

    assert len(dense) <= MOST_DENSE_FILES


def test_a_package_has_at_most_21_modules() -> None:
    counted = collections.Counter(
        pathlib.PurePosixPath(file).parent for file in FILES if not file.endswith("__init__.py")
    )

    assert {} == {str(folder): count for folder, count in counted.items() if count > MOST_MODULES}


CHILD_SIDE = ("workers/child/", "workers/spawner/", "processes/_reaper.py")
NOT_BELOW = {
    "workers/child/_by_value.py": "imported where a function or result is packed by value",
    "preload/_import_watch.py": "the launcher's own look at restarts",
}


def top_imports(file: str) -> set[str]:
    """Return the modules that *file* imports when it is imported itself, by their names."""
    found = set[str]()
    left = list(tree(HOUSE / file).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found.update(f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test)):
            left += node.body
    return found


def files_of(name: str) -> set[str]:
    """Return the files of this package that an import of *name* runs; none for others and for names in modules."""
    parts, found = name.split(".")[1:], set[str]()
    for count in range(len(parts) + 1):
        base = "/".join(parts[:count])
        found |= {file for file in (f"{base}.py", f"{base}/__init__.py".lstrip("/")) if (HOUSE / file).is_file()}
    if (defined_in := module_of(name)) is not None:  # an interface imports it at its first use
        found.add(defined_in)
    return found if name.partition(".")[0] == "elasticlib" else set()


def test_code_below_the_launcher_imports_only_python_and_itself() -> None:
    """A project may have modules of any name, attrs or cloudpickle too: its program finds its own."""
    left = {file for file in FILES if file.startswith(CHILD_SIDE) and file not in NOT_BELOW}
    seen, others = set[str](), set[tuple[str, str]]()
    while left:
        seen.add(file := left.pop())
        for name in top_imports(file):
            left |= files_of(name) - seen
            if (top := name.partition(".")[0]) not in {*sys.stdlib_module_names, "elasticlib"}:
                others.add((file, top))

    assert set() == others


WALKS = ("sys.modules.values()", "sys.modules.items()")


def test_code_that_walks_sys_modules_uses_helper_that_checks_types() -> None:
    """Programs put anything there: who walks through it goes by types, with `elasticlib.workers.child._loaded`."""
    walking = [file for file in FILES if any(walk in (HOUSE / file).read_text() for walk in WALKS)]

    assert [] == [file for file in walking if "workers/child/_loaded.py" not in map(module_of, imports(file))]


def test_every_module_states_its_purpose() -> None:
    assert [] == [file for file in FILES if not ast.get_docstring(tree(HOUSE / file))]


def test_torchs_own_launcher_is_not_used() -> None:
    parts = tuple(f"{each}." for each in TORCHS_OWN_LAUNCHER)

    assert [] == [(file, name) for file in FILES for name in imports(file) if f"{name}.".startswith(parts)]


def test_bytes_are_unpickled_only_if_our_own_processes_sent_them() -> None:
    found = {
        file
        for file in FILES
        for name in calls(file)
        if name.rpartition(".")[2] in UNPICKLING and name.partition(".")[0] in UNPICKLERS
    }
    by_name = {
        file
        for file in FILES
        for name in imports(file)
        if name.partition(".")[0] in UNPICKLERS and name.rpartition(".")[2] in UNPICKLING
    }

    assert set(MAY_UNPICKLE) == found
    assert set() == by_name


def test_one_package_alone_asks_which_calls_the_kernel_has() -> None:
    """Old kernels and strict containers lack them; all others take what `elasticlib.processes` offers."""
    calls_of_new_kernels = {"pidfd_open", "pidfd_send_signal", "memfd_create", "P_PIDFD"}
    found = {file for file in FILES for name in attributes(file) if name.rpartition(".")[2] in calls_of_new_kernels}

    assert set() == {file for file in found if layer(file) != "processes"}


def test_nothing_waits_by_what_counts_to_1023_descriptors_only() -> None:
    """A caller with many open files is an ordinary one: ``poll`` and ``epoll`` take any number."""
    found = {file for file in FILES if "select.select" in calls(file) or "select.select" in set(imports(file))}

    assert set() == found


def test_tests_of_the_pure_core_never_sleep() -> None:
    sources = [path for folder in ("unit", "sim", "contract") for path in (ROOT / "tests" / folder).rglob("*.py")]

    sleeping = {
        path.relative_to(ROOT).as_posix()
        for path in sources
        if "sleep" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and dotted(node.func) in ("time.sleep", "sleep")
    }

    assert sources
    assert set() == sleeping


OWN_CLOCKS = {
    "_clock.py": "it holds on to the functions",
    "metrics/_metric_streams.py": "get_elapsed_time_ms takes a beginning that the program read from time.time()",
}
PATCHED_BY_TESTS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "time": "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns sleep",
        "json": "dump dumps load loads",
    }.items()
    for name in names.split()
)


def test_functions_that_tests_often_patch_are_bound_at_import() -> None:
    """A frozen clock or another ``json.dumps`` around a launch would reach the launcher, and it would wait forever."""
    of_real_jobs = [file for file in FILES if layer(file) != "testing" and file not in OWN_CLOCKS]
    used = {(file, name) for file in of_real_jobs for name in attributes(file) & PATCHED_BY_TESTS}
    of_time = {(file, name) for file in of_real_jobs for name in imports(file) if name.startswith("time.")}

    assert set() == used | of_time


PAST_INTERFACES: dict[tuple[str, str], str] = {}
"""Imports past another package's interface, with their reasons: {(file, module)}."""
FACADES = ("elastic/", "launcher/", "__init__.py")
"""Torch's names, each from the module that has it: they are tables of names themselves."""


def past_interfaces(file: str) -> set[str]:
    """Return the modules inside other packages that *file* imports from directly."""
    own = file.partition("/")[0]
    found = {module_of_import(name) for name in imports(file)}
    inner = {each for each in found if each and "/" in each and not each.endswith("__init__.py")}
    return {each for each in inner if each.partition("/")[0] != own}


def module_of_import(name: str) -> str | None:
    """Return the file that an import statement spells, whether *name* is a module or something in one."""
    parts = name.split(".")
    for count in (len(parts), len(parts) - 1):
        base = "/".join(parts[1:count])
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if parts[0] == "elasticlib" and path in FILES:
                return path
    return None


def test_packages_are_entered_by_their_interfaces() -> None:
    """An ``__init__`` lists what other packages may import: everything else can be changed without a look elsewhere."""
    deep = {(file, module) for file in FILES if not file.startswith(FACADES) for module in past_interfaces(file)}

    assert set(PAST_INTERFACES) == deep


def test_every_package_interface_states_the_purpose_of_its_package() -> None:
    """In a few lines, before the names."""
    packages = [file for file in FILES if file.endswith("/__init__.py") and not file.startswith(FACADES)]
    texts = {file: ast.get_docstring(tree(HOUSE / file)) or "" for file in packages}

    assert {} == {file: text for file, text in texts.items() if not 60 < len(text)}
