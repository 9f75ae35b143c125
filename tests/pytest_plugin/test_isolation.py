"""Each test has workers as if it were alone: what others leave is named and gone, its random numbers are its own."""

from __future__ import annotations

import json

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.15)]

IMPORTS = """
import os, subprocess, sys, threading, time
import pytest, torch, torch.distributed as dist
"""


def test_leaks_are_named_and_the_next_test_has_new_workers(run: Run) -> None:
    result = run(
        IMPORTS
        + """
KEPT = []

def thread():
    threading.Thread(target=threading.Event().wait, name="of a test", daemon=True).start()

def variable():
    os.environ["OF_A_TEST"] = "1"

def process():
    KEPT.append(subprocess.Popen(["sleep", "1000"]))

def method():
    torch.nn.Linear.forward = lambda self, value: value

@pytest.mark.elastic(group="shared")
@pytest.mark.parametrize("dirty", [thread, variable, process, method], ids=lambda each: each.__name__)
def test_leaves(rank, dirty, folder):
    if rank == 1:
        dirty()
    (folder / f"{dirty.__name__}-{rank}").write_text(str(os.getpid()))

@pytest.mark.elastic(group="shared")
def test_next(rank, folder):
    assert "OF_A_TEST" not in os.environ and not KEPT
    assert [each.name for each in threading.enumerate()] == ["MainThread"]
    assert len(dist.distributed_c10d._world.pg_names) == 1
    for file in folder.iterdir():
        assert file.read_text() != str(os.getpid())

@pytest.mark.elastic(group="shared")
def test_leaves_a_group_beside_the_shared_one(rank, folder):
    (folder / f"group-{rank}").write_text(str(os.getpid()))
    dist.new_group([0, 1])

@pytest.mark.elastic(group="shared")
def test_finds_the_shared_group_alone(rank, folder):
    assert len(dist.distributed_c10d._world.pg_names) == 1
    assert (folder / f"group-{rank}").read_text() == str(os.getpid())

@pytest.mark.elastic(group=None)
def test_leaves_the_default_group():
    dist.init_process_group("gloo")

@pytest.mark.elastic(group=None)
def test_has_none(rank, folder):
    assert not dist.is_initialized()
    assert (folder / f"group-{rank}").read_text() == str(os.getpid())

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pids")
""",
        "-v",
        "-p",
        "no:randomly",
    )

    result.assert_outcomes(passed=9, warnings=4)
    result.stdout.fnmatch_lines(
        [
            "*test_leaves?thread?: rank 1 left 1 thread (of a test). New workers replace these: *",
            "*test_leaves?variable?: rank 1 changed the environment: OF_A_TEST = '1'. New workers*",
            "*test_leaves?process?: rank 1 left 1 process (sleep 1000). New workers*",
            "*test_leaves?method?: rank 1 replaced torch.nn.modules.linear.Linear.forward. New workers*",
        ]
    )


def test_ordinary_tests_leave_nothing(run: Run) -> None:
    result = run(
        IMPORTS
        + """
from torch.nn.parallel import DistributedDataParallel as DDP

def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()

@pytest.mark.elastic
def test_ddp():                                   # imports torch._dynamo, which sets a variable
    train(DDP(torch.nn.Linear(10, 10)))

@pytest.mark.elastic
def test_ddp_in_a_cycle():
    model = DDP(torch.nn.Linear(10, 10))
    model.me = [model]
    train(model)

@pytest.mark.elastic
def test_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(10, 10)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    train(model)

@pytest.mark.elastic
def test_groups():                                # which end with the test's own
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    dist.all_reduce(torch.ones(1), group=mesh["b"].get_group())
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))

@pytest.mark.elastic
def test_launch():                                # its fork server stays for the next one
    from elasticlib import LaunchConfig, elastic_launch

    assert {0: 0} == elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), int)()

@pytest.mark.elastic
def test_loader():                                # torch keeps a handler for SIGCHLD, Python a tracker of resources
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for persistent in (False, True):
        loader = torch.utils.data.DataLoader(data, 4, num_workers=1, persistent_workers=persistent)
        assert sum(len(each) for each, in loader) == 8

@pytest.mark.elastic
def test_processes():
    import multiprocessing
    from multiprocessing import shared_memory

    process = multiprocessing.get_context("spawn").Process(target=abs, args=(1,))
    process.start()
    process.join()
    memory = shared_memory.SharedMemory(create=True, size=10)
    memory.close()
    memory.unlink()
    subprocess.run(["true"], check=True)

@pytest.mark.elastic
def test_threads(tmp_path, rank):
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    ThreadPoolExecutor(2).submit(abs, 1).result()  # nobody holds it
    asyncio.run(asyncio.to_thread(abs, 1))
    open(tmp_path / str(rank), "w").write("nobody closes it")

@pytest.mark.elastic
def test_stores():
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    store.set("key", "value")
    dist.monitored_barrier()
    dist.all_gather_object([None, None], "an object")

@pytest.mark.elastic
def test_imports(rank, tmp_path):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.plot([1, 2])
    pyplot.savefig(tmp_path / f"{rank}.png")
    pyplot.close("all")

@pytest.mark.elastic
def test_an_import_that_does_all_of_it():
    import of_a_library

@pytest.mark.elastic
def test_modes():
    torch.manual_seed(1)
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), torch.random.fork_rng():
        torch.rand(1)
""",
        of_a_library="""
import logging, os, signal, sys, threading

os.environ["OF_A_LIBRARY"] = "1"
sys.path.append("/of/a/library")
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
logging.basicConfig()
threading.Thread(target=threading.Event().wait, daemon=True).start()
FILES = os.pipe()
""",
    )

    assert result.parseoutcomes()["passed"] == 12
    result.stdout.no_fnmatch_line("*New workers take*")


DRAWS = """
import json, os, random, sys
import numpy, pytest, torch

def draw():
    return [random.random(), float(numpy.random.rand()), float(torch.rand(1)), float(torch.randn(1))]

def note(name, rank):
    with open(os.path.join(os.environ["DRAWS"], f"{name}-{rank}"), "w") as file:
        json.dump(draw(), file)

@pytest.mark.elastic
def test_one(rank):
    note("one", rank)

@pytest.mark.elastic
def test_seeds(rank):
    draw()
    torch.manual_seed(7), random.seed(7), numpy.random.seed(7)

@pytest.mark.elastic
def test_two(rank):
    import draws_and_seeds                    # whoever imports it first
    note("two", rank)

@pytest.mark.elastic
def test_three(rank):
    import draws_and_seeds
    note("three", rank)

def test_four(elastic):
    elastic(note, "four", 0, nproc=1)
"""


def test_a_test_draws_the_same_numbers_in_any_order_and_each_rank_its_own(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "import random, torch\nrandom.random()\ntorch.rand(3)\ntorch.manual_seed(1)\n"
    found = []
    for order in ((), ("--elastic-reverse",)):
        folder = pytester.mkdir(f"draws{len(found)}")
        monkeypatch.setenv("DRAWS", str(folder))
        run(DRAWS, *order, draws_and_seeds=module).assert_outcomes(passed=5)
        found.append({file.name: json.loads(file.read_text()) for file in folder.iterdir()})

    assert found[0] == found[1]
    assert sorted(found[0]) == ["four-0", "one-0", "one-1", "three-0", "three-1", "two-0", "two-1"]
    every = [number for draws in found[0].values() for number in draws]
    assert len(set(every)) == len(every)


def test_report_shows_the_seed_of_a_failed_test(run: Run) -> None:
    result = run(
        """
import pytest, torch

@pytest.mark.elastic
def test_fails(rank):
    assert torch.initial_seed() == -1
"""
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Seeds of the ranks*", "rank 0: *, and each further rank the next number"])
