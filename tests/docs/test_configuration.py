"""The configuration reference is complete and true: what the code knows is there once, and nothing else is."""

from __future__ import annotations

import ast
import collections
import functools
import importlib.util
import inspect
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest

import elasticlib
from elasticlib import launch, records
from elasticlib.agent import LocalElasticAgent, _gpu_memory, _worker_watch
from elasticlib.cli._legacy import get_args_parser
from elasticlib.cli._option_table import OPTIONS
from elasticlib.cli._parser import Parser
from elasticlib.cli._request import _OF_SEVERAL_NODES, request_of
from elasticlib.errors import ConfigError
from elasticlib.launch import elastic_launch
from elasticlib.logs import DefaultLogsSpecs, _plugins
from elasticlib.logs._layout import DEFAULT_PREFIX
from elasticlib.numa import NumaOptions
from elasticlib.rendezvous import _rdzv_options
from elasticlib.rendezvous.node import _session_liveness
from elasticlib.rendezvous.sidecar import _sidecar_client
from elasticlib.rendezvous.stores.etcd import _backend as etcd
from elasticlib.spec import DEFAULT_PORT, DEFAULT_SIGNALS, LaunchConfig, WorkerSpec
from elasticlib.utils.distributed import create_c10d_store
from elasticlib.utils.log_level import get_log_level
from elasticlib.workers import _environment
from elasticlib.workers.child import _exiting, _function, _serving
from tests.docs import configuration
from tests.patching import replace_everywhere

HOUSE = pathlib.Path(elasticlib.__file__).parent
ROWS = {row.long: row for rows in OPTIONS.values() for row in rows}
NO_VARIABLES = {
    "STRICT_SPREAD": "a strategy of Ray",
    "SLURM_TIME_FORMAT": "set for scontrol",
    "PCI_BUS_ID": "a value of CUDA_DEVICE_ORDER",
    "PYTEST_ADDOPTS": "pytest's own: set aside while ranks read its configuration",
    "PYTEST_CURRENT_TEST": "pytest's own",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "pytest's own: ranks load no plugins",
    "PYTEST_PLUGINS": "pytest's own",
    "PYTEST_XDIST_TESTRUNUID": "pytest-xdist's own",
    "PYTEST_XDIST_WORKER": "pytest-xdist's own",
    "PYTEST_XDIST_WORKER_COUNT": "pytest-xdist's own",
    "PYTHONBREAKPOINT": "Python's own: who chose a debugger keeps it",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "torch's own: a process that is to fork must not begin with CUDA",
    "ITIMER_REAL": "a timer of Python's module signal",
    "ITIMER_VIRTUAL": "a timer of Python's module signal",
    "ITIMER_PROF": "a timer of Python's module signal",
    "ASSIGN_WORKER_RANKS": "a step of an agent, in events",
    "DEFAULT_PORT": "a name of a module",
    "ENABLE_USER_SITE": "a name of Python's module site",
    "SC_CLK_TCK": "of sysconf",
    "TMPDIR": "the system's own: the page says so in words",
    "TEST_SKIPS": "a name of a module of torch's own tests",
    "SC_OPEN_MAX": "of sysconf",
}
"""Text of the sources that looks like the name of a variable and is none of ours."""
OF_OTHERS = ("preload/_reads.py", "workers/spawner/_fork_server.py")
"""Modules that list what others read: `docs/fork_server.md` has it, held by a test of its own."""


@functools.cache
def page() -> str:
    return configuration.PAGE.read_text(encoding="utf-8")


@functools.cache
def section(title: str) -> list[list[str]]:
    """The rows of all tables between the heading *title* and the next one of its rank, without their heads."""
    found = re.search(rf"^(##+) {re.escape(title)}$\n(.*?)(?=^\1 |\Z)", page(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"no section {title!r}"
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in found[2].splitlines() if line.startswith("|")]
    rules = {at for at, cells in enumerate(rows) if set(cells) == {"---"}}
    return [[cell.strip() for cell in cells] for at, cells in enumerate(rows) if not {at, at + 1} & rules]


def named(cell: str) -> list[str]:
    """Return the code texts in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def in_first_cells(title: str) -> list[str]:
    return [name for cells in section(title) for name in named(cells[0])]


def test_its_tables_are_those_that_the_code_makes() -> None:
    """So each field, option, variable of an option and key is there once."""
    assert configuration.written(page()) == page(), "run: python -m tests.docs.configuration"


# Each name once, whoever wrote the table.


def test_page_lists_every_option_once() -> None:
    listed = in_first_cells("On the command line: `elasticrun`")
    parsers = (Parser({}), get_args_parser())
    known = {name for each in parsers for action in each._actions for name in action.option_strings if "_" not in name}

    assert [] == [name for name, count in collections.Counter(listed).items() if count > 1]
    assert known == set(listed)


def test_no_handler_reads_a_key_that_is_not_in_it() -> None:
    """Those that torch's way of making a handler looks up one by one."""
    read = set()
    for path in (HOUSE / "rendezvous").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"(?:params\.get\w*|options\.get|others\.get|options)[(\[]\"(\w+)\"", text))

    assert {"keep_alive_interval", "read_timeout", "etcd_prefix"} <= read <= set(_rdzv_options.RDZV_CONF_KEYS)


ARGUMENTS: Mapping[str, tuple[Any, set[str]]] = {
    "elastic_launch": (elastic_launch, {"config", "entrypoint"}),
    "NumaOptions": (NumaOptions, set()),
    "LocalElasticAgent": (LocalElasticAgent, set()),
}
"""Callables with arguments that are not fields, and those arguments that are listed elsewhere."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_page_lists_every_argument_with_its_default(name: str) -> None:
    called, elsewhere = ARGUMENTS[name]
    rows = [*section("In Python: `LaunchConfig`"), *section("An agent of your own")]
    listed = {named(cells[0])[0]: cells[1] for cells in rows if named(cells[0])[0].startswith(f"{name}(")}
    wanted = {
        f"{name}({each.name})": "required" if each.default is each.empty else f"`{each.default!r}`"
        for each in inspect.signature(called).parameters.values()
        if each.name not in elsewhere
    }
    if "LocalElasticAgent(sink)" in wanted:
        assert inspect.signature(called).parameters["sink"].default is records.log
        wanted["LocalElasticAgent(sink)"] = "`records.log`"

    assert wanted == listed


# Defaults and connections are the real ones.


IN_OPTIONS = {
    "join_timeout": "join_timeout",
    "last_call_timeout": "last_call",
    "heartbeat_timeout": "heartbeat",
    "reconnect_timeout": "reconnect_timeout",
    "close_timeout": "close_timeout",
    "store_linger": "store_linger",
    "store_type": "store_type",
}
"""Keys with a default that `Options` holds: where."""


@pytest.mark.parametrize(
    ("backend", "name"),
    [(each, name) for name in IN_OPTIONS for each in sorted(_rdzv_options.RDZV_CONF_KEYS[name].backends)],
)
def test_a_keys_default_is_what_counts_where_it_is_not_given(backend: str, name: str) -> None:
    """In a launch, which gives its own time-out to all backends; ``600; static, etcd: 900`` says two of them."""
    (shown,) = (cells[3] for cells in section("Keys of `--rdzv-conf`") if named(cells[0]) == [name])
    most, _, exception = shown.partition("; ")
    exceptional, _, other = exception.partition(": ")

    real = getattr(_rdzv_options.read(backend, LaunchConfig(rdzv_backend=backend).rdzv_configs), IN_OPTIONS[name])

    documented = other if backend in exceptional.split(", ") else most
    assert documented == (real if isinstance(real, str) else f"{real:g}")


def test_defaults_described_in_prose_match_the_code() -> None:
    """Of constants that the texts cannot be made from, for they lie above them."""
    attempt, share = _session_liveness.ATTEMPT, _session_liveness.RECONNECT
    alive = (
        _rdzv_options.read("c10d", {"keep_alive_interval": "4"}).heartbeat / 4,
        _rdzv_options.read("c10d", {"keep_alive_max_attempt": "1"}).heartbeat,
    )
    job = {"rdzv_backend": "c10d", "rdzv_endpoint": "host:0"}

    part = {0.25: "a quarter"}[share]
    assert (
        f"{attempt:g}; after a loss of contact: {part} of heartbeat_timeout, at least 1 and at most {attempt:g}"
        == _rdzv_options.RDZV_CONF_KEYS["read_timeout"].default
    )
    assert [_rdzv_options.RDZV_CONF_KEYS[f"keep_alive_{name}"].default for name in ("max_attempt", "interval")] == [
        f"{each:g}" for each in alive
    ]
    assert LaunchConfig(**job).wait_for == _rdzv_options.RDZV_CONF_KEYS["wait_for"].default  # type: ignore[arg-type]
    assert ROWS["--shutdown-timeout"].unset == f"{launch.TIMEOUT_VARIABLE}, else {launch.DEFAULT_SHUTDOWN_TIMEOUT}"
    assert ROWS["--exit-timeout"].unset.startswith(f"{_exiting.DEFAULT_EXIT_TIMEOUT:g} after")
    assert ROWS["--log-line-prefix-template"].unset.endswith(f"else {DEFAULT_PREFIX}")
    assert (
        f"(default port {DEFAULT_PORT}; for etcd: its server, default port {etcd.DEFAULT_PORT})"
        in ROWS["--rdzv-endpoint"].help
    )
    docstrings = configuration.docstrings(LaunchConfig)
    assert f"{launch.TIMEOUT_VARIABLE}, else {launch.DEFAULT_SHUTDOWN_TIMEOUT}" in docstrings["shutdown_timeout"]
    assert f"None gives {_exiting.DEFAULT_EXIT_TIMEOUT:g} s" in docstrings["exit_timeout"]
    assert f"else {LaunchConfig().rdzv_configs['timeout']}" in docstrings["rdzv_timeout"]


def test_port_of_a_static_job_is_the_documented_one() -> None:
    config = config_of("--nnodes", "2", "--master-addr", "host")

    assert f"host:{ROWS['--master-port'].unset.partition(';')[0]}" == config.rdzv_endpoint


def config_of(*arguments: str) -> LaunchConfig:
    return request_of(Parser({}).parse_args([*arguments, "train.py"]), {}).config


SAMPLES = {
    "--nnodes": "2:3",
    "--nproc-per-node": "5",
    "--start-method": "spawn",
    "--preload": "",
    "--max-restarts": "9",
    "--monitor-interval": "9",
    "--shutdown-timeout": "9",
    "--exit-timeout": "9",
    "--end-time": "9",
    "--redirects": "3",
    "--tee": "3",
    "--local-ranks-filter": "1",
    "--logs-specs": "default",
    "--rdzv-backend": "etcd",
    "--rdzv-conf": "join_timeout=9",
    "--wait-for": "max",
    "--node-rank": "1",
    "--numa-binding": "node",
    "--signals-to-handle": "SIGTERM",
    "--event-log-handler": "console",
}
"""Values that are not the default, where any text will not do."""
TOGETHER = {"--node-rank": ("--nnodes", "2", "--master-port", "29500")}
"""Arguments that an option needs beside it to have an effect."""


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if configuration.in_python(row)])
def test_an_option_fills_the_fields_that_stand_beside_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin(DefaultLogsSpecs):
        pass

    replace_everywhere(monkeypatch, _plugins, "load_logs_specs", lambda _: Plugin)
    beside = TOGETHER.get(name, ())
    before, after = (
        config_of(*beside),
        config_of(*beside, name, *(() if ROWS[name].is_flag else (SAMPLES.get(name, "x:1"),))),
    )

    changed = {each for each in configuration.FIELDS if getattr(before, each) != getattr(after, each)}

    assert set(configuration.fields_of(ROWS[name]) or ("logs_specs",)) <= changed


# Variables.


@functools.cache
def sources() -> dict[str, str]:
    return {path.relative_to(HOUSE).as_posix(): path.read_text(encoding="utf-8") for path in HOUSE.rglob("*.py")}


def constants(text: str) -> Iterator[tuple[str, str]]:
    """All text of a module but for docstrings, and what is assigned or called with it, where that is."""
    prose: set[int] = set()
    place: dict[int, str] = {}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr):
            prose.add(id(node.value))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            place[id(node.value)] = node.targets[0].id
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            place[id(node.args[0])] = ast.unparse(node.func)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node)
    yield from ((str(node.value), place.get(id(node), "")) for node in found if id(node) not in prose)


@functools.cache
def our_constants() -> dict[str, list[tuple[str, str]]]:
    return {path: list(constants(text)) for path, text in sources().items()}


def looks_like_a_variable(text: str, place: str) -> bool:
    """In capitals with an underscore; or without one, where it is looked up in an environment or called a variable."""
    if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", text):
        return True
    return bool(re.fullmatch(r"[A-Z]{3,}", text) and re.search(r"environ(ment)?\.get$|VARIABLE$", place))


def set_in_workers() -> set[str]:
    place = _environment.NodePlace("", "", *([1] * 4), 0, *([1] * 5), "", 1)  # type: ignore[arg-type]
    with_a_device = _environment.alone_with_a_device({_environment.HIP_DEVICES_VARIABLE: "0"}, 1)[0]
    of_the_sidecar = {name for name, value in _sidecar_client.environment().items() if os.environ.get(name) != value}
    return {
        *_environment.worker_variables(place, 0, ""),
        *_environment.common_variables({}, 1, ""),
        *with_a_device,
        *(_worker_watch.FILE, _serving.SERVER_VARIABLE, _serving.SERVED_VARIABLE, _function.DEFINITIONS_VARIABLE),
        *of_the_sidecar,
    }


def known_variables() -> set[str]:
    found = {
        name
        for path, texts in our_constants().items()
        for name, place in texts
        if path not in OF_OTHERS and not path.endswith("__init__.py") and looks_like_a_variable(name, place)
    }
    return {name for name in found if not name.startswith("PET_")} - NO_VARIABLES.keys()


READ, SET = "Environment variables that are read", "Environment variables that are set"


@pytest.mark.slow
def test_page_lists_every_variable_and_no_other() -> None:
    read, written = in_first_cells(READ), in_first_cells(SET)

    assert [] == [name for names in (read, written) for name, count in collections.Counter(names).items() if count > 1]
    assert known_variables() | set_in_workers() == {*read, *written}


def test_page_lists_every_variable_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RES_OPTIONS", raising=False)  # these tests run with the sidecar's own value

    assert set_in_workers() == set(in_first_cells(SET))


@pytest.mark.slow
def test_listed_exceptions_are_still_constants_of_the_code() -> None:
    """So that the list of exceptions does not grow old."""
    assert set() == NO_VARIABLES.keys() - {name for texts in our_constants().values() for name, _ in texts}


def test_page_lists_every_variable_that_help_docstrings_or_errors_name() -> None:
    mentioned = {
        name
        for text in sources().values()
        for name in re.findall(r"\b(?:ELASTICLIB|TORCHELASTIC)_[A-Z_]*[A-Z]\b", text)
    }

    assert set() == mentioned - {*in_first_cells(READ), *in_first_cells(SET)}


def test_a_variables_default_is_the_codes() -> None:
    events, others = "INFO", get_log_level()
    defaults = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"`{launch.DEFAULT_SHUTDOWN_TIMEOUT}`",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"`{DEFAULT_PREFIX}`",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": f"`{DEFAULT_SIGNALS}`",
        "LOGLEVEL": f"`{others}`; of events `{events}`",
        "USE_LIBUV": "`1`",
        "TORCHELASTIC_ENABLE_FILE_TIMER": "`0`",
        "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "`0`",
        "ELASTICLIB_GPU_MEMORY_TIMEOUT": f"`{_gpu_memory.LIMIT:g}`",
    }
    listed = {name: cells[3] for cells in section(READ) for name in named(cells[0])}

    assert defaults == {name: listed[name] for name in defaults}
    assert f'os.environ.get(LOG_LEVEL_VARIABLE) or "{events}"' in (HOUSE / "events/_destinations.py").read_text(
        encoding="utf-8"
    )
    assert f'os.environ.get(LOG_LEVEL_VARIABLE) or "{others}"' in (HOUSE / "run.py").read_text(encoding="utf-8")
    assert 'os.environ.get("USE_LIBUV", "1")' in inspect.getsource(create_c10d_store)


# Nothing that the code does not know.


def test_every_option_and_variable_that_its_prose_names_exists() -> None:
    prose = re.sub(r"^\|.*$", "", page(), flags=re.MULTILINE)
    code = " ".join(named(prose))
    everything = "\n".join(text for text in sources().values())

    options = set(re.findall(r"--[a-z][\w-]+", code)) - {
        name for row in ROWS.values() for name in (row.long, f"--{row.dest}")
    }
    variables = set(re.findall(r"\b[A-Z]+_[A-Z_]*[A-Z]\b|\bTMPDIR\b", code)) - {row.variable for row in ROWS.values()}

    assert set() == options
    assert set() == {name for name in variables if not re.search(rf"\b{name}\b", everything)}


@pytest.mark.slow
def test_names_listed_without_effect_are_known_to_the_code_or_to_torch() -> None:
    names = {name for name in in_first_cells("Taken, and without effect") if not name.startswith("--")}
    known = {
        *_rdzv_options.RDZV_CONF_KEYS,
        *configuration.FIELDS,
        *(field.name for field in attrs.fields(WorkerSpec)),
        *inspect.signature(LocalElasticAgent).parameters,
        *("WorkerSpec", "handler"),
    }

    assert {"TORCH_ELASTIC_WORKER_IDENTICAL"} == names - known
    assert set() == {"TORCH_ELASTIC_WORKER_IDENTICAL"} & known_variables()


def test_beside_standalone_the_options_of_several_nodes_have_no_effect() -> None:
    """As the page says of that group, but for two."""
    of_the_group = {row.dest for row in OPTIONS["several nodes"]} - {"local_addr", "standalone", "engine"}

    assert set(_OF_SEVERAL_NODES) == of_the_group


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="not installed: torch")
def test_page_lists_every_variable_of_torchs_launcher() -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    root = pathlib.Path(found.origin).parent
    parts = ("distributed/elastic", "distributed/launcher", "distributed/run.py", "distributed/launch.py")
    paths = [
        path for part in parts for path in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    ]
    theirs = {
        name
        for path in paths
        for name, place in constants(path.read_text(encoding="utf-8"))
        if looks_like_a_variable(name, place)
    } - NO_VARIABLES.keys()

    ours = {*in_first_cells(READ), *in_first_cells(SET), *in_first_cells("Taken, and without effect")}

    assert {"PYTHON_EXEC", "TORCH_ELASTIC_WORKER_IDENTICAL"} <= theirs
    assert set() == {name for name in theirs if not name.startswith("PET_")} - ours


def test_a_bad_variable_is_refused_by_its_own_name() -> None:
    """As the page says of all of them."""
    with pytest.raises(ConfigError, match=r"^PET_NNODES: 'x' is neither"):
        Parser({"PET_NNODES": "x"}).parse_args(["train.py"])
