"""Rows 065 to 086 and 172: where the workers' output goes, and how much a launcher tells of itself."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.checklist._workers import QUICK, names, script
from tests.checklist.peers import ROOT, Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

TWO = "--nproc-per-node=2"
IN_LOGS = "--log-dir=logs"
NAMED = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
"""With these a job of one node keeps the id that it is given."""

SPEAK = "os.write(1, b'out %d\\n' % RANK)\nos.write(2, b'err %d\\n' % RANK)\n"
"""One write a line: workers may share the console."""


def kept(peer: Peer, base: str = "logs") -> dict[str, str]:
    """Return the contents of a launch's non-empty files, by path below the launch's folder."""
    found = {}
    for path in peer.folder.glob(f"{base}/*/attempt_*/**/*"):
        if path.is_file() and path.stat().st_size:
            found["/".join(path.relative_to(peer.folder / base).parts[1:])] = path.read_text(errors="replace")
    return found


def numbered_lines(text: str, stream: str) -> list[str]:
    """The lines of a console that end with *stream* and a number, sorted: launchers have lines of their own."""
    return sorted(line for line in text.splitlines() if re.search(rf"{stream} \d+$", line))


@pytest.mark.row(65)
def test_without_a_redirect_output_reaches_the_launchers_own_streams(peer: Peer) -> None:
    done = peer.run(TWO, script(peer, SPEAK), env=QUICK)

    assert ["out 0", "out 1"] == sorted(done.out.splitlines())
    assert ["err 0", "err 1"] == numbered_lines(done.err, "err")


@pytest.mark.row(66)
def test_redirected_streams_are_in_files_of_each_rank_only(peer: Peer) -> None:
    done = peer.run(*NAMED, "--rdzv-id=job7", TWO, "-r", "3", IN_LOGS, script(peer, SPEAK), env=QUICK)

    assert {
        f"attempt_0/{rank}/std{name}.log": f"{name} {rank}\n" for rank in (0, 1) for name in ("out", "err")
    } == kept(peer)
    (folder,) = peer.folder.glob("logs/*")
    assert re.fullmatch(r"job7_\w{8}", folder.name)  # the random part may hold underscores
    assert ([], []) == (numbered_lines(done.out, "out"), numbered_lines(done.err, "err"))


@pytest.mark.row(67)
def test_a_map_redirects_by_rank_and_leaves_other_ranks_alone(peer: Peer) -> None:
    done = peer.run("--nproc-per-node=3", "-r", "0:1,1:2", IN_LOGS, script(peer, SPEAK), env=QUICK)

    assert {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/1/stderr.log": "err 1\n"} == kept(peer)
    assert ["out 1", "out 2"] == numbered_lines(done.out, "out")
    assert ["err 0", "err 2"] == numbered_lines(done.err, "err")


@pytest.mark.row(69, improvement=True)
def test_a_map_reaches_ranks_of_two_digits(peer: Peer) -> None:
    done = peer.run("--nproc-per-node=11", "-r", "10:1", IN_LOGS, script(peer, SPEAK), env=QUICK)

    assert {"attempt_0/10/stdout.log": "out 10\n"} == kept(peer)
    assert sorted(f"out {rank}" for rank in range(10)) == numbered_lines(done.out, "out")


@pytest.mark.row(70)
def test_teed_lines_are_in_the_file_and_on_the_console_after_role_and_rank(peer: Peer) -> None:
    done = peer.run(TWO, "--role=trainer", "-t", "3", IN_LOGS, script(peer, SPEAK), env=QUICK)

    assert ["[trainer0]:out 0", "[trainer1]:out 1"] == sorted(done.out.splitlines())
    assert ["[trainer0]:err 0", "[trainer1]:err 1"] == numbered_lines(done.err, "err")
    assert "err 1\n" == kept(peer)["attempt_0/1/stderr.log"]
    assert 4 == len(kept(peer))


@pytest.mark.row(71)
def test_a_template_makes_the_prefix_of_teed_lines(peer: Peer) -> None:
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}|${rank}|$local_rank|${host}> "}

    done = peer.run(TWO, "-t", "1", IN_LOGS, script(peer, SPEAK), env={**QUICK, **template})

    assert [f"<default|{rank}|{rank}|${{host}}> out {rank}" for rank in (0, 1)] == sorted(done.out.splitlines())


@pytest.mark.row(72, improvement=True)
def test_line_written_in_two_parts_is_printed_once_with_one_prefix(peer: Peer) -> None:
    """The writer pauses within its lines, for longer than torchrun's tail sleeps."""
    halves = script(
        peer,
        "for i in range(8):\n"
        "    os.write(1, b'first half of %d, ' % i)\n"
        "    time.sleep(0.15)\n"
        "    os.write(1, b'second half\\n')",
    )

    done = peer.run("-t", "1", IN_LOGS, halves, env=QUICK)

    assert [f"[default0]:first half of {i}, second half" for i in range(8)] == done.out.splitlines()


@pytest.mark.row(73)
def test_a_last_line_without_newline_is_on_the_console(peer: Peer) -> None:
    done = peer.run("-t", "1", IN_LOGS, script(peer, "os.write(1, b'first\\nlast words')"), env=QUICK)

    assert ["[default0]:first", "[default0]:last words"] == done.out.splitlines()


@pytest.mark.row(74)
def test_a_hundred_thousand_teed_lines_are_complete_and_in_order_by_rank(peer: Peer) -> None:
    """Lines of 16 bytes: none lies across two pages of its file, where torchrun may tear it."""
    many = script(peer, "for i in range(50_000):\n    os.write(1, b'%015d\\n' % i)")

    done = peer.run(TWO, "-t", "1", IN_LOGS, many, env=QUICK)

    lines = done.out.splitlines()
    for rank in (0, 1):
        prefix = f"[default{rank}]:"
        assert [f"{prefix}{i:015d}" for i in range(50_000)] == [line for line in lines if line.startswith(prefix)]
    assert 100_000 == len(lines)


@pytest.mark.row(75)
def test_bytes_that_are_not_utf_8_do_not_stop_the_tee(peer: Peer) -> None:
    done = peer.run("-t", "1", IN_LOGS, script(peer, "os.write(1, b'caf\\xe9 \\xff\\xfe\\nafter\\n')"), env=QUICK)

    assert ["[default0]:caf\ufffd \ufffd\ufffd", "[default0]:after"] == done.out.splitlines()


@pytest.mark.row(76)
def test_a_rank_that_the_filter_leaves_out_is_in_its_files_only(peer: Peer) -> None:
    done = peer.run(TWO, "-t", "1", "--local-ranks-filter=0", IN_LOGS, script(peer, SPEAK), env=QUICK)

    assert ["[default0]:out 0"] == done.out.splitlines()
    assert ["err 0"] == numbered_lines(done.err, "err")
    assert {f"attempt_0/{rank}/stdout.log": f"out {rank}\n" for rank in (0, 1)} == kept(peer)


@pytest.mark.row(78)
@pytest.mark.parametrize(("shown", "ranks"), [("", (0, 1)), ("--local-ranks-filter=1,2", (1,))])
def test_matching_lines_of_teed_streams_are_in_one_file_more(peer: Peer, shown: str, ranks: tuple[int, ...]) -> None:
    """The stdout of rank 2 is redirected, not tee'd."""
    path = script(peer, "for fruit in ('apple', 'pear', 'plum'):\n    print(fruit, RANK, flush=True)\n" + SPEAK)
    filters = ("--duplicate-stdout-filters=apple,lum", "--duplicate-stderr-filters=rr")

    options = [shown] if shown else []
    peer.run("--nproc-per-node=3", "-t", "0:1,1:3", "-r", "2:1", *filters, *options, IN_LOGS, path, env=QUICK)

    found = kept(peer)
    expected = [f"[default{rank}]:{fruit} {rank}" for rank in ranks for fruit in ("apple", "plum")]
    assert expected == sorted(found["attempt_0/filtered_stdout.log"].splitlines())
    assert "[default1]:err 1\n" == found["attempt_0/filtered_stderr.log"]


@pytest.mark.row(79)
def test_logs_go_to_a_temporary_folder_of_their_own_without_log_dir(peer: Peer) -> None:
    peer.script("", "tmp/keep")
    path = script(peer, "note(f'seen{os.getpid()}', os.readlink('/proc/self/fd/1'))")

    for _ in range(2):
        peer.run("-r", "1", path, env={**QUICK, "TMPDIR": str(peer.folder / "tmp")})

    seen = [pathlib.Path((peer.folder / name).read_text()) for name in names(peer, "seen*")]
    bases = {path.relative_to(peer.folder / "tmp").parts[0] for path in seen}
    assert 2 == len(bases)
    assert all(base.startswith("torchelastic_") for base in bases)
    assert [("attempt_0", "0", "stdout.log")] * 2 == [path.parts[-3:] for path in seen]
    assert all(path.is_file() for path in seen)


@pytest.mark.row(80)
def test_a_missing_log_folder_is_made(peer: Peer) -> None:
    peer.run("-r", "1", "--log-dir=not/yet/there", script(peer, SPEAK), env=QUICK)

    assert {"attempt_0/0/stdout.log": "out 0\n"} == kept(peer, "not/yet/there")


@pytest.mark.row(80)
def test_a_log_folder_that_is_a_file_is_refused(peer: Peer) -> None:
    peer.script("", "file")

    with pytest.raises(NotADirectoryError, match="file"):
        peer.module("multiprocessing").DefaultLogsSpecs(log_dir=str(peer.folder / "file")).reify({0: {}})


@pytest.mark.row(81)
def test_a_second_attempt_has_a_folder_of_its_own_and_keeps_the_first(peer: Peer) -> None:
    path = script(peer, "print(f'attempt {RESTART}', flush=True)\nsys.exit(1 - RESTART)")

    peer.run("--max-restarts=1", "-r", "1", IN_LOGS, path, env=QUICK)

    found = {name: text for name, text in kept(peer).items() if name.endswith("stdout.log")}
    assert {f"attempt_{n}/0/stdout.log": f"attempt {n}\n" for n in (0, 1)} == found


@pytest.mark.row(82, improvement=True)
def test_a_round_that_new_members_begin_keeps_the_logs_of_the_round_before(peer: Peer) -> None:
    """Such a round has the restart count of the one before it; torchrun makes its folder by deleting that one's."""
    multiprocessing = peer.module("multiprocessing")
    logs = multiprocessing.DefaultLogsSpecs(log_dir=str(peer.folder / "logs"), redirects=multiprocessing.Std.OUT)
    paths = []
    for members in (1, 2):
        rank = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_WORLD_SIZE": str(members)}
        paths.append(pathlib.Path(logs.reify({0: rank}).stdouts[0]))
        paths[-1].write_text(f"one of {members}")

    assert ["one of 1", "one of 2"] == [path.read_text() for path in paths]


@pytest.mark.row(83)
def test_launcher_writes_no_files_with_the_null_device_as_log_folder(peer: Peer) -> None:
    peer.script("", "tmp/keep")
    path = script(peer, "print(repr(os.environ['TORCHELASTIC_ERROR_FILE']), flush=True)\n" + SPEAK)

    done = peer.run("--log-dir=/dev/null", "-r", "3", path, env={**QUICK, "TMPDIR": str(peer.folder / "tmp")})

    assert ["''", "out 0"] == done.out.splitlines()
    assert ["err 0"] == numbered_lines(done.err, "err")
    assert [] == [*peer.folder.glob("tmp/torchelastic_*")]


@pytest.mark.row(84, improvement=True)
def test_a_run_id_may_hold_a_slash(peer: Peer) -> None:
    done = peer.run(*NAMED, "--rdzv-id=team/job", "-r", "1", IN_LOGS, script(peer, SPEAK), env=QUICK)

    assert (0, {"attempt_0/0/stdout.log": "out 0\n"}) == (done.returncode, kept(peer))


PLUG_IN = """
import os
from {elastic}.multiprocessing import LogsDest, LogsSpecs, Std

class OneFileEach(LogsSpecs):
    def __init__(self, *, log_dir, redirects, tee, local_ranks_filter):
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        assert (redirects, tee, local_ranks_filter) == (Std.NONE, {1: Std.OUT}, {0, 1})

    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        os.makedirs(self.root_log_dir, exist_ok=True)
        streams = {rank: f"{self.root_log_dir}/{env['RANK']}.txt" for rank, env in envs.items()}
        errors = {rank: f"{path}.error" for rank, path in streams.items()}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[rank]
            env["MADE_BY"] = "a plug-in"
        dest = LogsDest()
        dest.stdouts = streams
        dest.stderrs = {rank: "" for rank in envs}
        dest.tee_stdouts = {1: streams[1]}
        dest.error_files = errors
        return dest
"""


@pytest.mark.row(85)
def test_a_plug_in_makes_the_layout_of_the_logs(peer: Peer) -> None:
    peer.script(PLUG_IN, "site/plug_in.py")
    info = "site/plug_in-1.0.dist-info"
    peer.script("Metadata-Version: 2.1\nName: plug-in\nVersion: 1.0\n", f"{info}/METADATA")
    peer.script("[torchrun.logs_specs]\nflat = plug_in:OneFileEach\n", f"{info}/entry_points.txt")
    path = script(peer, "print(f'{RANK}', os.environ['MADE_BY'], os.environ['TORCHELASTIC_ERROR_FILE'])")
    options = ("--logs-specs=flat", "--tee=1:1", "--local-ranks-filter=0,1")
    installed = {"PYTHONPATH": f"{ROOT}:{peer.folder / 'site'}"}

    done = peer.run(TWO, *options, "--log-dir=flat", path, env={**QUICK, **installed})

    lines = [f"{rank} a plug-in flat/{rank}.txt.error\n" for rank in (0, 1)]
    assert lines == [path.read_text() for path in sorted(peer.folder.glob("flat/*.txt"))]
    assert f"[default1]:{lines[1]}" == done.out


FROM_BELOW = """
import ctypes, subprocess, sys

def speak():
    libc = ctypes.CDLL(None)
    libc.printf(b"from C\\n")
    libc.fflush(None)
    subprocess.run(["sh", "-c", "echo from a child; echo from its stderr >&2"], check=True)
    print("from Python", flush=True)
"""

CALLABLE = """
from {distributed}.launcher import LaunchConfig, elastic_launch
from {elastic}.multiprocessing import DefaultLogsSpecs, Std

if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        start_method="spawn", max_restarts=0, logs_specs=DefaultLogsSpecs(log_dir="logs", redirects=Std.ALL),
    )
    elastic_launch(config, speak)()
"""


@pytest.mark.row(86)
@pytest.mark.parametrize("kind", ["script", "callable"])
def test_a_redirect_takes_what_c_code_and_child_processes_write_too(peer: Peer, kind: str) -> None:
    if kind == "script":
        done = peer.run("-r", "3", IN_LOGS, peer.script(FROM_BELOW + "speak()"), env=QUICK)
    else:
        done = peer.python(FROM_BELOW + CALLABLE)

    assert "from C\nfrom a child\nfrom Python\n" == kept(peer)["attempt_0/0/stdout.log"]
    assert "from its stderr\n" in kept(peer)["attempt_0/0/stderr.log"]
    assert "from" not in done.out


IGNORED = ("--signals-to-handle", "SIGTERM,SIGNOSUCH")
"""Asks for a signal that there is not, which is worth a warning."""


def levels(peer: Peer, **environment: str) -> set[str]:
    """First letters of the levels at which the launcher told something."""
    done = peer.run(*IGNORED, "--no-python", "true", env={**QUICK, **environment})
    assert done.returncode == 0, done.err
    return set(re.findall(r"^([DIWEC]) ?\d{4}", done.err, re.MULTILINE))


@pytest.mark.row(172)
@pytest.mark.sampled(1.0)
def test_warnings_are_shown_and_the_environment_may_ask_for_more(peer: Peer) -> None:
    assert levels(peer) == {"W"}
    assert levels(peer, LOGLEVEL="INFO") == {"I", "W"}
