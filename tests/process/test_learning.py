"""What is learned of imports changes nothing that a program sees, from its first run to its last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticlib.workers import _reaper
from tests.process.launches import children, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

ROOT = Path(__file__).parents[2]
LEARN = [sys.executable, "-m", "elasticlib.run", "--preload", "learn", "--nproc-per-node"]

PACKAGES = {
    "plain.py": "value = 1\nclass Point:\n    def __init__(self, x): self.x = x\n",
    "reads_home.py": "import os\nhome = os.environ.get('MY_HOME', 'none')\n",
    "writes.py": "import os\nos.environ['WRITTEN'] = 'yes'\nos.environ.setdefault('FILLED', 'yes')\n",
    "filters.py": "import warnings\nwarnings.filterwarnings('ignore', message='quiet')\n",
    "threaded.py": "import threading\nlock = threading.Event()\n"
    "thread = threading.Thread(target=lock.wait, daemon=True)\nthread.start()\n",
    "starts.py": "import subprocess\nsaid = subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout\n",
    "temporary.py": "import os, tempfile\npath = tempfile.mkdtemp()\nos.rmdir(path)\n",
    "draws.py": "import random\nfirst = random.random()\n",
    "seeds.py": "import random\nrandom.seed(3)\n",
    "owns.py": "import random\nmine = random.Random(5).random()\ngenerator = random.Random()\n",
    "ranked.py": "import os\nrank = os.environ.get('RANK')\n",
    "prints.py": "print('imported')\n",
    "lazy.py": "import sys, types\nclass Lazy(types.ModuleType):\n    value = 7\n"
    "sys.modules[__name__].__class__ = Lazy\n",
    "replaced.py": "import sys, types\nother = types.ModuleType('replaced')\nother.value = 8\n"
    "sys.modules[__name__] = other\n",
    "exits.py": "import atexit\natexit.register(print, 'exit of the library')\n",
    "optional.py": "try:\n    import not_there\nexcept ImportError:\n    not_there = None\n",
    "fails.py": "raise ImportError('no such device')\n",
    "finder.py": "import sys\nclass Finder:\n    def find_spec(self, *_): pass\nsys.meta_path.append(Finder())\n",
    "handlers.py": "import logging\nlog = logging.getLogger('library')\nlog.addHandler(logging.NullHandler())\n",
    "family/__init__.py": "from family import first\n__all__ = ['first', 'second']\n",
    "family/first.py": "value = 1\n",
    "family/second.py": "value = 2\n",
    "generic.py": "import dataclasses, typing\n@dataclasses.dataclass\nclass Item:\n    x: 'typing.Any' = None\n",
}
"""Of a folder of installed packages."""
SLOW = "import time\ntime.sleep(0.06)\n"
"""What takes no time is not worth learning."""
SCRIPTS = {
    "plain": "import plain; print(plain.value, plain.__file__.endswith('plain.py'))",
    "before": "import sys; print('plain' in sys.modules); import plain; print('plain' in sys.modules)",
    "condition": "import os\nif os.environ.get('NEVER'): import prints\nprint('done')",
    "environment": "import os; os.environ['MY_HOME'] = '/mine'; import reads_home; print(reads_home.home)",
    "writes": "import os; print(os.environ.get('WRITTEN')); import writes; "
    "print(os.environ['WRITTEN'], os.environ['FILLED'])",
    "own value": "import os; os.environ['FILLED'] = 'mine'; import writes; print(os.environ['FILLED'])",
    "filters": "import warnings; n = len(warnings.filters); import filters; print(len(warnings.filters) - n)",
    "threads": "import threaded, threading; print(threaded.thread.is_alive(), threading.active_count())",
    "starts": "import starts; print(starts.said)",
    "temporary": "import temporary, os; print(os.path.exists(temporary.path))",
    "seeds": "import seeds, random; print(random.random())",
    "own generator": "import owns; print(owns.mine)",
    "rank": "import ranked; print(ranked.rank)",
    "prints": "import prints; print('after')",
    "lazy": "import lazy, replaced; print(lazy.value, replaced.value)",
    "exits": "import exits; print('before')",
    "optional": "import optional; print(optional.not_there)",
    "fails": "try:\n    import fails\nexcept ImportError as e:\n    print(e)\nimport plain",
    "traceback": "import traceback\ntry:\n    import fails\nexcept ImportError:\n    print(traceback.format_exc())",
    "finder": "import sys; n = len(sys.meta_path); import finder; print(len(sys.meta_path) - n, len(sys.meta_path))",
    "star": "from family import *; print(first.value, second.value)",
    "attribute": "import family; print(hasattr(family, 'second')); import family.second; print(family.second.value)",
    "by name": "import importlib; print(importlib.import_module('.second', 'family').value)",
    "pickle": "import pickle, plain; print(pickle.loads(pickle.dumps(plain.Point(3))).x)",
    "hints": "import typing, generic; print(typing.get_type_hints(generic.Item))",
    "logging": "import logging.config as c, handlers; c.dictConfig({'version': 1}); print(handlers.log.disabled)",
    "own file": "import helper; print(helper.value)",
    "threads import": "import threading\n"
    "workers = [threading.Thread(target=__import__, args=(n,)) for n in ('plain', 'family', 'generic')]\n"
    "[each.start() for each in workers]; [each.join() for each in workers]\n"
    "import sys; print(all(n in sys.modules for n in ('plain', 'family', 'generic')))",
    "spawned": "import multiprocessing, plain\n"
    "if __name__ == '__main__':\n"
    "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(abs, [-3]))",
    "forked": "import os, plain\npid = os.fork()\n"
    "if pid == 0:\n    import family; print(family.first.value, flush=True); os._exit(0)\n"
    "os.waitpid(pid, 0)",
    "reload": "import importlib, plain; plain.value = 5; print(importlib.reload(plain).value)",
    "removed": "import sys, plain; plain.value = 5; del sys.modules['plain']; import plain; print(plain.value)",
    "main": "import sys; print(sys.modules['__main__'].__dict__ is globals(), __name__, len(sys.meta_path), sys.path)",
}


class House:
    """A folder with a script, packages that are installed for it, and the cache of what is learned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = folder / "site-packages"
        for name, source in PACKAGES.items():
            file = self.packages / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(SLOW + source)
        (folder / "helper.py").write_text("import plain\nvalue = plain.value + 1\n")
        path = os.pathsep.join([str(ROOT), str(self.packages)])
        cache = str(folder / "cache")
        self.environment = {**os.environ, "PYTHONPATH": path, "ELASTICLIB_CACHE": cache, "LOGLEVEL": "INFO"}

    def script(self, source: str) -> str:
        """The path of a script with that *source*."""
        (self.folder / "script.py").write_text(source + "\n")
        return str(self.folder / "script.py")

    def run(self, command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=120)
        assert 0 == done.returncode, done.stdout + done.stderr
        return done

    def profile(self) -> dict[str, object]:
        """What was learned."""
        (file,) = (self.folder / "cache").iterdir()
        found: dict[str, object] = json.loads(file.read_text())
        return found


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_later_runs_of_a_script_do_what_a_plain_program_does(name: str, house: House) -> None:
    """The first learns, the second imports ahead, the third does so with what the second taught."""
    script = house.script(SCRIPTS[name])
    house.environment["RANK"] = "0"  # of the plain program; a worker has its own
    plain = house.run([sys.executable, "-u", script]).stdout.splitlines()

    runs = [house.run([*LEARN, "1", script]) for _ in range(3)]

    assert [plain] * 3 == [run.stdout.splitlines() for run in runs]
    assert [""] * 3 == ["\n".join(line for line in run.stderr.splitlines() if " I " in line) for run in runs]


def test_what_all_workers_import_is_learned_and_its_body_runs_once(house: House) -> None:
    """Of what one rank alone imports each worker does its own."""
    (house.packages / "counted.py").write_text(
        SLOW + "import os\nfile = open('/dev/null'); file.close()\npid = os.getpid()\n"
    )
    script = house.script(
        "import os, counted\nif os.environ['RANK'] == '1': import plain\nprint(counted.pid == os.getpid(), counted.pid)"
    )

    first, second = (house.run([*LEARN, "2", script]).stdout.split() for _ in range(2))

    assert ["True", "True"] == [first[0], first[2]]
    assert ["False", "False"] == [second[0], second[2]]
    assert second[1] == second[3]
    assert ["counted"] == [each[0] for each in house.profile()["imports"] if each[0] in ("counted", "plain")]  # type: ignore[attr-defined]


def test_what_a_run_does_not_import_any_more_is_dropped(house: House) -> None:
    house.run([*LEARN, "1", house.script("import plain, family")])
    house.run([*LEARN, "1", house.script("import plain")])

    assert ["plain"] == [each[0] for each in house.profile()["imports"]]  # type: ignore[attr-defined]


def test_torch_is_there_ahead_in_every_run_of_a_script_that_reaches_it_through_a_package(house: House) -> None:
    (house.packages / "indirect.py").write_text("import torch\n")
    script = house.script("print('libtorch' in open('/proc/self/maps').read()); import indirect")

    runs = [house.run([*LEARN, "1", script]).stdout.split() for _ in range(3)]

    assert [["True"]] * 3 == runs


def test_chance_is_drawn_anew_by_each_worker_and_run(house: House) -> None:
    """Also by a generator that a learned module made for itself."""
    script = house.script(
        "import os, random, owns; os.write(1, f'{random.random()} {owns.generator.random()}\\n'.encode())"
    )

    seen = [line for _ in range(3) for line in house.run([*LEARN, "2", script]).stdout.split()]

    assert 12 == len(set(seen))


def test_a_restart_has_what_was_learned_in_the_round_before(house: House) -> None:
    """Workers that live on while the copy is made; the next round's are forked from it."""
    (house.packages / "counted.py").write_text(SLOW + "import os\npid = os.getpid()\n")
    script = house.script(
        "import os, sys, time, counted\n"
        f"done = {str(house.folder / 'done')!r}\n"
        "os.write(1, f'{counted.pid == os.getpid()}\\n'.encode())\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    while not os.path.exists(done): time.sleep(0.05)\n"
        "    sys.exit(3)\n"
    )
    command = [*LEARN, "2", "--max-restarts", "1", script]
    errors = house.folder / "errors"
    with open(errors, "w") as file:
        job = subprocess.Popen(command, env=house.environment, stdout=subprocess.PIPE, stderr=file, text=True)
        wait_until(lambda: "are learned" in errors.read_text())
        (house.folder / "done").touch()
        output, _ = job.communicate(timeout=60)

    assert 0 == job.returncode, errors.read_text()
    assert ["True", "True", "False", "False"] == output.split()


@pytest.mark.parametrize("victim", ["copy", "copy's spawner"])
def test_a_copy_that_is_killed_costs_the_round_that_it_serves_alone(victim: str, house: House) -> None:
    source = (
        "import os, sys, time, plain\n"
        "print('up', os.getpid(), flush=True)\n"
        "while os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0': time.sleep(0.05)\n"
    )
    house.run([*LEARN, "1", house.script("import plain")])
    script = house.script(source)
    job = subprocess.Popen(
        [*LEARN, "1", "--max-restarts", "1", script], env=house.environment, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    pid = int(job.stdout.readline().split()[1])
    chain = ancestors(pid, job.pid)  # spawner, copy, fork server, reaper

    os.kill(chain[1] if victim == "copy" else chain[0], signal.SIGKILL)

    output, _ = job.communicate(timeout=60)
    assert (0, 1) == (job.returncode, output.count("up"))
    assert 4 == len(chain)
    assert [] == [each for each in chain if os.path.exists(f"/proc/{each}")]


def test_a_fork_server_that_is_killed_while_it_makes_a_copy_takes_that_along(house: House) -> None:
    waits = house.folder / "waits"
    (house.packages / "waited.py").write_text(
        f"{SLOW}import os\nwhile os.path.exists({str(waits)!r}): time.sleep(0.05)\n"
    )
    script = house.script(
        "import os, sys, time, waited\n"
        "print('up', os.getpid(), flush=True)\n"
        "while os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0': time.sleep(0.05)\n"
    )
    job = subprocess.Popen(
        [*LEARN, "1", "--max-restarts", "1", script], env=house.environment, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    pid = int(job.stdout.readline().split()[1])
    waits.touch()
    spawner, fork_server, reaper = ancestors(pid, job.pid)
    wait_until(lambda: len(children(fork_server)) == 2)
    everybody = [pid, spawner, *children(fork_server), fork_server, reaper]

    os.kill(fork_server, signal.SIGKILL)

    waits.unlink()
    output, _ = job.communicate(timeout=60)
    assert (0, 1) == (job.returncode, output.count("up"))
    assert [] == [each for each in everybody if os.path.exists(f"/proc/{each}")]


def ancestors(pid: int, top: int) -> list[int]:
    """Parents of *pid* below *top*, the nearest first."""
    found = []
    while (facts := _reaper.status(pid)) is not None and (pid := int(facts[1])) != top:
        found.append(pid)
    return found


def test_a_module_that_spoils_the_copy_costs_nothing_but_that(house: House) -> None:
    """A crash at its import included: it works in a worker, the first time."""
    (house.packages / "crashes.py").write_text(
        SLOW + "import os, sys\nif 'script.py' not in ' '.join(sys.argv): os.abort()\n"
    )
    script = house.script("import os, crashes, plain; os.write(1, b'fine\\n')")

    outputs = [house.run([*LEARN, "2", script]).stdout.split() for _ in range(3)]

    assert [["fine", "fine"]] * 3 == outputs


def test_a_damaged_profile_is_one_line(house: House) -> None:
    script = house.script("import plain; print('fine')")
    house.run([*LEARN, "1", script])
    (file,) = (house.folder / "cache").iterdir()
    file.write_text("{")

    done = house.run([*LEARN, "1", script])

    assert "fine\n" == done.stdout
    assert 1 == done.stderr.count("is ignored, and written anew after this run")
    assert house.profile()["whole"]


def test_a_profile_that_names_what_is_not_there_is_no_harm(house: House) -> None:
    script = house.script("import plain; print('fine')")
    house.run([*LEARN, "1", script])
    (file,) = (house.folder / "cache").iterdir()
    body = json.loads(file.read_text())
    body["imports"].insert(0, ["gone_since", str(house.packages / "gone_since.py"), []])
    file.write_text(json.dumps(body))

    assert "fine\n" == house.run([*LEARN, "1", script]).stdout
    assert ["plain"] == [each[0] for each in house.profile()["imports"]]  # type: ignore[attr-defined]


def test_a_script_without_torch_does_not_wait_for_it(house: House) -> None:
    """By its text at first, later by what its runs have shown."""
    (house.packages / "torch").mkdir()
    (house.packages / "torch" / "__init__.py").write_text(
        "open('torch was imported', 'w').close()\nget_num_threads = lambda: 1\nset_num_threads = abs\n"
    )
    house.run([*LEARN, "1", house.script("import json; print('fine')")], house.folder)
    assert not (house.folder / "torch was imported").exists()
    house.environment["ELASTICLIB_CACHE"] += " of another user"
    shown = house.script("import importlib; print('fine')")

    outputs = []
    for _ in range(2):
        outputs.append(
            (house.run([*LEARN, "1", shown], house.folder).stdout, (house.folder / "torch was imported").exists())
        )
        (house.folder / "torch was imported").unlink(missing_ok=True)

    assert [("fine\n", True), ("fine\n", False)] == outputs


def test_a_package_that_was_installed_anew_is_the_new_one_in_the_next_launch(house: House) -> None:
    """Of one program, such as a notebook: what was learned of the old one is no use any more."""
    (house.packages / "changes.py").write_text(SLOW + "value = 1\n")
    (house.folder / "functions.py").write_text("def value():\n    import changes\n    return changes.value\n")
    program = (
        "import sys, functions\n"
        "from pathlib import Path\n"
        "from elasticlib import LaunchConfig, elastic_launch\n"
        "from elasticlib.workers._fork_servers import fork_servers\n"
        "from tests.process.launches import wait_until\n"
        "launch = lambda: elastic_launch(LaunchConfig(nproc_per_node=1), functions.value)()[0]\n"
        "first = launch()\n"
        "is_ready = lambda each: each.copy_for(dict(each._copy_environment)) == 'ready'\n"
        "wait_until(lambda: any(map(is_ready, fork_servers._kept)))\n"
        "again = launch()\n"
        f"Path({str(house.packages / 'changes.py')!r}).write_text('value = 2222\\n')\n"
        "print(first, again, launch())\n"
    )
    (house.folder / "program.py").write_text(program)

    done = house.run([sys.executable, str(house.folder / "program.py")])

    assert "1 1 2222\n" == done.stdout
