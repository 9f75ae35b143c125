"""What an import may not leave behind where nobody asked for it, and what of it comes back to a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
PROGRAM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from elasticlib.workers.child._import_notes import Import
from elasticlib.workers.spawner import _ahead
wanted = [Import(name, f"{sys.argv[1]}/{name.replace('.', '/')}.py", frozenset(["CHANGED"])) for name in sys.argv[2:]]
before = set(sys.modules)
try:
    print(json.dumps(_ahead.import_ahead(wanted, ["OWN"], paced="HURRY" not in os.environ)))
except _ahead.SpoiltError as error:
    print(json.dumps([error.module, error.why, [each.name for each in error.instead]]))
    sys.exit()
here = lambda: sorted(set(sys.modules) - before - {"encodings.idna"})
"""


def run(folder: Path, *names: str, then: str = "", **variables: str) -> list[Any]:
    """What each line says that is printed after importing *names* ahead from *folder*."""
    command = [sys.executable, "-c", PROGRAM + then, str(folder), *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert 0 == done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()] + ([done.stderr] if done.stderr else [])


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("1 / 0", "its import fails with ZeroDivisionError"),
        ("raise SystemExit(3)", "its import fails with SystemExit"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "thread"),
        ("import subprocess; subprocess.run(['true'])", "starts a process"),
        ("import os; os.system('true')", "starts a process"),
        ("import os; os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)", "starts a process"),
        ("import socket; socket.socket().bind(('127.0.0.1', 0))", "uses the network"),
        ("import socket; kept = socket.socket()", "changes open files"),
        ("kept = open('/dev/null')", "changes open files"),
        ("import tempfile; tempfile.NamedTemporaryFile()", "writes a file"),
        ("open('written', 'w').close()", "writes a file"),
        ("import pathlib; pathlib.Path('x').unlink(missing_ok=True)", "changes files"),
        ("import textwrap; textwrap.dedent = print", "changes textwrap.dedent"),
        ("import builtins; builtins.mine = 1", "changes builtins.mine"),
        ("import logging; logging.basicConfig()", "changes the logging of all"),
        ("import sys; sys.modules['textwrap'] = sys", "changes sys.modules"),
        ("import mmap; kept = mmap.mmap(-1, 10)", "changes shared memory"),
        ("import os; mine = dict(os.environ)", "copies the environment, of which the program changes CHANGED"),
        ("import os; os.getenv('CUDA_VISIBLE_DEVICES')", "reads CUDA_VISIBLE_DEVICES"),
        ("import tempfile; tempfile.mkdtemp()", "makes a temporary folder"),
        ("import os; os.environ.get('OWN')", "reads OWN"),
        ("import os; os.environ.get('CHANGED')", "reads CHANGED"),
        ("import os; os.getenv('RANK')", "reads RANK"),
        ("import random; random.random()", "changes random numbers"),
        ("import random; random.seed(3)", "changes random numbers"),
        ("print('hello')", "writes to the console"),
        ("import os; os.write(2, b'native')", "writes to the console"),
        ("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "changes a signal's handler"),
        ("import os; os.chdir('/')", "changes the working folder"),
        ("import sys; sys.path.append('/x')", "changes the search path"),
        ("import sys; sys.excepthook = print", "changes the hooks for errors"),
        ("import sys; sys.setrecursionlimit(5000)", "changes limits of the interpreter"),
        ("import socket; socket.setdefaulttimeout(3)", "changes the time limit of sockets"),
        ("import gc; gc.disable()", "turns the garbage collector off"),
        ("import sys; sys.settrace(lambda *_: None)", "changes tracing"),
        ("import subprocess; subprocess.Popen.__init__ = lambda *_: None", "replaces __init__"),
    ],
)
def test_what_leaves_something_behind_is_refused(source: str, why: str, installed: Path) -> None:
    (installed / "leaves.py").write_text(source)

    ((module, said, _),) = run(installed, "leaves")

    assert "leaves" == module
    assert why in said


def test_what_changes_one_that_was_imported_ahead_is_refused(installed: Path) -> None:
    """Rule: what comes with the first of two imports is no more to be changed by the second than what was there."""
    (installed / "first.py").write_text("def given(): return 1")
    (installed / "second.py").write_text("import first; first.given = len")
    assert [["second", "its import changes first.given", []]] == run(installed, "first", "second")


def test_where_somebody_waits_what_the_imports_change_is_looked_at_once(installed: Path) -> None:
    """Rule: nothing is missed for that; which import it was is not known then."""
    (installed / "first.py").write_text("def given(): return 1")
    (installed / "second.py").write_text("import first; first.given = len")
    (installed / "third.py").touch()
    assert [["first", "third"]] == run(installed, "first", "third", HURRY="yes")
    assert [["", "the imports change first.given", []]] == run(installed, "first", "second", HURRY="yes")
    (installed / "third.py").write_text("import shutil; shutil.move = len")
    assert [["", "the imports change shutil.move", []]] == run(installed, "first", "third", HURRY="yes")


def test_a_module_of_another_file_is_refused(installed: Path) -> None:
    (installed / "elsewhere").mkdir()
    (installed / "elsewhere" / "__init__.py").touch()

    ((module, said, _),) = run(installed, "elsewhere")

    assert ("elsewhere", True) == (module, "it is found elsewhere than in the worker" in said)


def test_of_what_is_refused_the_imports_of_other_packages_may_do(installed: Path) -> None:
    package = installed / "whole"
    package.mkdir()
    (package / "__init__.py").write_text("import other, os\nfrom whole import part\nos.getenv('RANK')\n")
    (package / "part.py").write_text("from third import name\nimport missing_for_sure\n")
    (installed / "other.py").write_text("import below\n")
    (installed / "below.py").touch()
    (installed / "third.py").write_text("name = 1\n")
    (package / "part.py").write_text("from third import name\n")

    ((module, _, instead),) = run(installed, "whole")

    assert "whole" == module
    assert ["other", "third"] == instead


def test_what_was_imported_ahead_is_not_there_until_it_is_imported_with_what_it_imports(installed: Path) -> None:
    (installed / "one.py").write_text("import two\n")
    (installed / "two.py").touch()
    (installed / "three.py").write_text("import two, lazy\ndef later():\n    import four\n")
    (installed / "four.py").touch()
    (installed / "lazy.py").touch()
    then = """
print(json.dumps(here()))
import one
print(json.dumps(here()))
import three
print(json.dumps(here()))
three.later()
print(json.dumps(here()))
"""

    names, *seen = run(installed, "four", "one", "three", then=then)

    assert ["four", "one", "three"] == names
    assert [
        [],
        ["one", "two"],
        ["lazy", "one", "three", "two"],
        ["four", "lazy", "one", "three", "two"],
    ] == seen


def test_its_body_runs_once_and_its_submodules_are_attributes_when_they_are_imported(installed: Path) -> None:
    package = installed / "family"
    package.mkdir()
    (package / "__init__.py").write_text("born = []\n")
    (package / "child.py").write_text("import family; family.born.append(1)\n")
    (installed / "needs.py").write_text("import family\n")
    then = """
import family
print(json.dumps(hasattr(family, "child")))
import family.child
print(json.dumps([family.born, family.child is sys.modules["family.child"]]))
"""
    program = """
wanted = [Import("needs", f"{sys.argv[1]}/needs.py"), Import("family.child", f"{sys.argv[1]}/family/child.py")]
print(json.dumps(_ahead.import_ahead(wanted, [], paced=True)))
"""

    seen = run(installed, then=program + then)

    assert [[], ["needs", "family.child"], False, [[1], True]] == seen


def test_a_module_puts_another_in_the_place_of_its_package_when_it_is_imported(installed: Path) -> None:
    """As parts of Transformers do: the program has the old one until then."""
    package = installed / "family"
    package.mkdir()
    (package / "__init__.py").write_text("names = 1\n")
    (package / "user.py").write_text("import family\n")
    (package / "early.py").touch()
    (package / "late.py").touch()
    (package / "change.py").write_text(
        "import family.early, sys\n"
        "new = type(sys)('family')\n"
        "new.__path__, new.__spec__ = family.__path__, family.__spec__\n"
        "sys.modules['family'] = new\n"
        "import family.late\n"
    )
    then = """
import family
first = family
def look():
    now = sys.modules["family"]
    found = [sorted(name for name in vars(each) if name[0] != "_") for each in (first, now)]
    print(json.dumps([now is first, getattr(sys.modules.get("family.user"), "family", None) is now, *found]))
look()
import family.user
look()
import family.change
look()
import family.late
look()
"""
    wanted = (
        "Import('family', sys.argv[1] + '/family/__init__.py'), Import('family.user', sys.argv[1] + '/family/user.py')"
    )
    ahead = f"_ahead.import_ahead([{wanted}, Import('family.change', sys.argv[1] + '/family/change.py')], [], False)\n"

    plain, learned = run(installed, then=then), run(installed, then=f"print(json.dumps({ahead.strip()}))" + then)

    assert ["family", "family.user", "family.change"] == learned.pop(1)
    assert plain == learned


def test_variables_filters_and_finders_come_with_the_import(installed: Path) -> None:
    (installed / "effects.py").write_text(
        "import os, sys, warnings\n"
        "os.environ['WRITTEN'] = 'by effects'\n"
        "os.environ.setdefault('FILLED', 'by effects')\n"
        "warnings.filterwarnings('error', message='mine')\n"
        "class Finder:\n    def find_spec(self, *_): return None\n"
        "sys.meta_path.append(Finder())\n"
    )
    then = """
import os, warnings
os.environ.pop("WRITTEN"), os.environ.pop("FILLED")
def facts(): return [os.environ.get("WRITTEN"), os.environ.get("FILLED"), len(sys.meta_path), len(warnings.filters)]
before = facts()
import effects
after = facts()
print(json.dumps([before[:2], after[:2], after[2] - before[2], after[3] - before[3], warnings.filters[0][0]]))
"""

    _, seen = run(installed, "effects", then=then)

    assert [[None, None], ["by effects", "by effects"], 1, 1, "error"] == seen


def test_a_variable_that_the_program_set_since_is_told(installed: Path) -> None:
    (installed / "reads.py").write_text("import os\nhome = os.environ.get('MY_HOME')\n")

    _, said = run(installed, "reads", then="\nimport os; os.environ['MY_HOME'] = '/mine'\nimport reads\n")

    assert "MY_HOME was set after reads had read it: it has no effect here, but will in the next run" in said


def test_a_variable_that_its_own_import_has_read_and_set_is_no_news(installed: Path) -> None:
    (installed / "whole.py").write_text("import part\n")
    (installed / "part.py").write_text("import os\nos.environ.setdefault('MY_HOME', '/part')\n")

    _, seen = run(
        installed,
        "whole",
        then="""
import os
os.environ.pop("MY_HOME")
import whole
print(json.dumps(os.environ["MY_HOME"]))
""",
    )

    assert "/part" == seen, "and nothing was said"


def test_another_name_of_a_module_comes_with_that_module(installed: Path) -> None:
    """As of extension modules that Cython makes."""
    (installed / "whole.py").write_text("import part\n")
    (installed / "part.py").write_text("import sys\nsys.modules['_alias'] = sys.modules['part']\n")

    then = "\nsys.meta_path.append(type('Finder', (), {'find_spec': lambda *_: None}))\nimport part"

    _, seen = run(installed, "whole", then=then + "\nprint(json.dumps(here()))\n")

    assert ["_alias", "part"] == seen


def test_a_file_that_hides_it_by_now_is_imported_instead(installed: Path, tmp_path: Path) -> None:
    (installed / "shadowed.py").write_text("mine = False\n")
    (tmp_path / "shadowed.py").write_text("mine = True\n")
    then = f"\nsys.path.insert(0, {str(tmp_path)!r})\nimport shadowed\nprint(json.dumps(shadowed.mine))\n"

    assert [["shadowed"], True] == run(installed, "shadowed", then=then)


def test_what_the_program_put_in_its_place_stays(installed: Path) -> None:
    (installed / "mocked.py").write_text("mine = False\n")
    (installed / "uses.py").write_text("import mocked\n")
    then = """
import types
sys.modules["mocked"] = types.ModuleType("mocked")
import uses, mocked
print(json.dumps(hasattr(mocked, "mine")))
"""

    assert [["uses"], False] == run(installed, "uses", then=then)


def test_the_next_process_finds_nothing_of_the_watch(installed: Path) -> None:
    (installed / "plain.py").touch()
    things = (
        "\nimport builtins, importlib, os, socket, subprocess, tempfile, random\n"
        "facts = lambda: [repr(each) for each in ("
        "builtins.__import__, importlib.import_module, os.fork, os.system, socket.socket.connect, socket.getaddrinfo, "
        "subprocess.Popen.__init__, tempfile.mkdtemp, random.Random.seed, type(os.environ).__getitem__, sys.meta_path, "
        "sys.path_hooks, tempfile.tempdir)]\n"
    )
    program = things + (
        "first = facts()\n"
        "_ahead.import_ahead([Import('plain', f'{sys.argv[1]}/plain.py')], [], paced=True)\n"
        "print(json.dumps(first == facts()))\n"
    )

    assert [[], True] == run(installed, then=program)


def test_a_traceback_has_no_frame_of_ours(installed: Path) -> None:
    (installed / "fails.py").write_text("import nowhere_to_be_found\n")
    (installed / "plain.py").touch()
    then = """
import traceback
try:
    import fails
except ImportError as error:
    print(json.dumps([frame.name for frame in traceback.extract_tb(error.__traceback__)]))
"""

    assert [["plain"], ["<module>", "<module>"]] == run(installed, "plain", then=then)


def test_what_is_imported_only_by_another_comes_with_its_effects(installed: Path) -> None:
    """Whoever of those that import it comes first."""
    (installed / "sets.py").write_text(
        "import os, warnings\nos.environ['SET'] = '1'\nwarnings.filterwarnings('error')\n"
    )
    (installed / "one.py").write_text("import sets\n")
    (installed / "two.py").write_text("import sets\n")
    then = """
import os, warnings
os.environ.pop("SET")
import two
print(json.dumps([os.environ.get("SET"), warnings.filters[0][0], "one" in sys.modules]))
"""

    assert [["one", "two"], ["1", "error", False]] == run(installed, "one", "two", then=then)


def test_what_a_function_loads_at_import_comes_with_it(installed: Path) -> None:
    """As packages do that load their parts when these are asked for."""
    package = installed / "parts"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib\ndef __getattr__(name):\n"
        "    if name == 'Model': return importlib.import_module('parts.model').Model\n"
        "    raise AttributeError(name)\n"
    )
    (package / "model.py").write_text("from base import Base\nclass Model(Base): pass\n")
    (installed / "base.py").write_text("class Base: pass\n")
    (installed / "user.py").write_text("from parts import Model\n")
    then = """
import inspect, user
print(json.dumps([inspect.getfile(each).endswith(".py") for each in user.Model.__mro__[:2]]))
"""

    assert [["user"], [True, True]] == run(installed, "user", then=then)


def test_a_file_that_hides_what_it_imports_is_the_programs_own(installed: Path, tmp_path: Path) -> None:
    (installed / "library.py").write_text("import numbers_of_mine\n")
    (installed / "numbers_of_mine.py").write_text("mine = False\n")
    (tmp_path / "numbers_of_mine.py").write_text("mine = True\n")
    then = f"""
sys.path.insert(0, {str(tmp_path)!r})
import library, numbers_of_mine
print(json.dumps(numbers_of_mine.mine))
"""

    assert [["library"], True] == run(installed, "library", then=then)


def test_a_submodule_that_came_later_is_no_attribute_before(installed: Path) -> None:
    """Of a package that was imported ahead itself."""
    package = installed / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "late.py").touch()
    program = """
wanted = [Import("pack", f"{sys.argv[1]}/pack/__init__.py"), Import("pack.late", f"{sys.argv[1]}/pack/late.py")]
_ahead.import_ahead(wanted, [], paced=False)
import pack
print(json.dumps(hasattr(pack, "late")))
from pack import late
print(json.dumps(["pack.late" in sys.modules, pack.late is late]))
"""

    assert [[], False, [True, True]] == run(installed, then=program)


def test_what_modules_kept_of_the_watch_is_pythons_own_afterwards(installed: Path) -> None:
    (installed / "keeps.py").write_text(
        "import builtins\nfrom importlib import import_module\nfrom socket import getaddrinfo\nfrom os import remove\n"
        "imports = builtins.__import__\n"
    )
    then = """
import builtins, importlib, keeps, os, socket
kept = keeps.imports, keeps.import_module, keeps.getaddrinfo, keeps.remove
print(json.dumps(kept == (builtins.__import__, importlib.import_module, socket.getaddrinfo, os.remove)))
"""

    assert [["keeps"], True] == run(installed, "keeps", then=then)


@pytest.mark.parametrize("hurry", [{}, {"HURRY": "1"}], ids=["paced", "at once"])
def test_what_may_ask_for_ipythons_shell_is_left_to_the_worker_which_has_its_own(
    hurry: dict[str, str], installed: Path
) -> None:
    """Matplotlib's backend for notebooks shows figures as text where it was imported without one."""
    core = installed / "IPython" / "core"
    core.mkdir(parents=True)
    (installed / "IPython" / "__init__.py").write_text("from IPython.core import interactiveshell\n")
    (core / "__init__.py").write_text("")
    (core / "interactiveshell.py").write_text("class InteractiveShell: pass\n")
    (installed / "other.py").write_text("")
    (installed / "backend.py").write_text("import other\nfrom IPython import core\n")

    [[module, why, instead]] = run(installed, "backend", **hurry)

    assert "backend" == module
    assert "its import brings IPython's shell, of which each worker has its own" == why
    assert ["other"] == instead
