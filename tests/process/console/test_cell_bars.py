"""Progress bars of several ranks in a notebook's cell, and what it says where nothing comes at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient

from tests.process.console.cells import executed

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

SETUP = """
import contextlib, io, os, sys, threading, time
from elasticlib import LaunchConfig, elastic_launch, pool
from elasticlib.notebook import _callers_stream

def settings(workers=2, **more):
    return LaunchConfig(nproc_per_node=workers, max_restarts=0, preload=(), **more)

# In workers: what they write waits, in the middle of a bar, for the cell to have shown it.

def write(text):
    sys.stderr.write(text)
    sys.stderr.flush()

def wait(file):
    while not os.path.exists(file):
        time.sleep(0.01)

def bars(file, epochs=1):
    print("begin", flush=True)
    for epoch in range(epochs):
        for step in range(6):
            write(f"\\r{epoch}: {step}/5")
            if step == 3:
                wait(f"{file}{epoch}")
        write("\\n")
        print("epoch", epoch, flush=True)

def nested(file):
    for epoch in range(2):
        write(f"\\router {epoch}")
        for step in range(3):
            for part in ("\\n", f"\\r inner {step}", "\\x1b[A"):
                write(part)
        wait(file)
        for part in ("\\n", "\\r        ", "\\x1b[A"):
            write(part)
    write("\\router 2\\n")
    print("end")

# In the kernel: what the front end received, and the signal for the workers to go on.

shown = []
publish = get_ipython().display_pub.publish

def noted(data, *args, **kwargs):
    shown.append(data.get("text/plain", ""))
    return publish(data, *args, **kwargs)

get_ipython().display_pub.publish = noted

def go(file, *texts, number=""):
    until = time.monotonic() + 60
    while not any(all(text in each for text in texts) for each in shown) and time.monotonic() < until:
        time.sleep(0.01)
    shown.clear()
    open(f"{file}{number}", "w").close()

def resume_later(file, ranks, epochs=1):
    def run():
        for epoch in range(epochs):
            go(file, *[f"[{rank}] {epoch}: 3/5" for rank in range(ranks)], number=epoch)
    threading.Thread(target=run).start()
    return file
"""


def messages_of(*cells: str) -> list[list[tuple[str, str]]]:
    """Return the kernel's messages for each of *cells* after `SETUP`: kind and text."""
    found: list[list[tuple[str, str]]] = [[] for _ in (SETUP, *cells)]

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            content = msg["content"]
            text = content.get("text") or content.get("data", {}).get("text/plain", "")
            if msg["msg_type"] in ("stream", "display_data", "update_display_data"):
                found[cell_index].append((msg["msg_type"], text))
            return super().process_message(msg, cell, cell_index)

    for cell, messages in zip(executed(SETUP, *cells, client=Client), found, strict=True):
        messages.append(("kept", "|".join(_kept(output) for output in cell.outputs)))
    return found[1:]


def _kept(output: Any) -> str:
    return str(output.text if output.output_type == "stream" else output.data.get("text/plain", ""))


def of(kind: str, messages: list[tuple[str, str]]) -> list[str]:
    return [text for each, text in messages if each == kind]


def lines(messages: list[tuple[str, str]]) -> list[str]:
    return "".join(of("stream", messages)).splitlines()


def test_bars_of_several_ranks_stay_bars_and_files_have_all(tmp_path: Path) -> None:
    file = str(tmp_path / "go")
    shown, logs = messages_of(
        f"job = elastic_launch(settings(3, show='all'), bars).start(resume_later({file!r}, 3))\njob.result()\nNone",
        "print([job.logs(rank) for rank in range(3)])",
    )

    assert sorted(lines(shown)) == sorted(f"[{rank}] {line}" for rank in range(3) for line in ("begin", "epoch 0"))
    last = "\n".join(f"[{rank}] 0: 5/5" for rank in range(3))
    assert of("update_display_data", shown)[-1] == last
    assert len(of("display_data", shown)) == 1
    (kept,) = of("kept", shown)
    before, _, after = kept.partition(last)
    assert "begin" in before and "epoch" not in before
    assert "epoch" in after and "5/5" not in after
    raw = "begin\n" + "".join(f"\r0: {step}/5" for step in range(6)) + "\nepoch 0\n"
    assert "".join(of("stream", logs)) == f"{[raw] * 3}\n"


def test_later_bars_have_a_new_place_and_nested_bars_stand_below(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in "ab"]
    both = "\n".join(f"[{rank}] outer 0\n[{rank}]  inner 2" for rank in (0, 1))
    epochs, nested = messages_of(
        f"elastic_launch(settings(show='all'), bars)(resume_later({files[0]!r}, 2, 2), 2)\nNone",
        f"threading.Thread(target=go, args=({files[1]!r}, {both!r})).start()\n"
        f"elastic_launch(settings(show='all'), nested)({files[1]!r})\nNone",
    )

    (kept,) = of("kept", epochs)
    assert [part for part in kept.split("|") if "5/5" in part] == [
        "[0] 0: 5/5\n[1] 0: 5/5",
        "[0] 1: 5/5\n[1] 1: 5/5",
    ]
    assert both in of("display_data", nested) + of("update_display_data", nested)
    assert of("update_display_data", nested)[-1] == "[0] outer 2\n[1] outer 2"
    assert sorted(lines(nested)) == ["[0] end", "[1] end"]


def assert_lines(found: list[str], times: int) -> None:
    """Those of `bars` for a caller that keeps text."""
    for rank in (0, 1):
        mine = [line.removeprefix(f"[{rank}] ") for line in found if line.startswith(f"[{rank}] ")]
        assert [line for line in mine if not re.fullmatch("0: [0-4]/5", line)] == ["begin", "0: 5/5", "epoch 0"] * times


def test_each_call_of_a_pool_has_its_bars_in_its_own_cell(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in "ab"]
    _, *cells = messages_of(
        "p = pool(2, group=None, preload=(), show='all')",
        *[f"p.run(bars, resume_later({file!r}, 2))\nNone" for file in files],
    )

    for cell in cells:
        assert of("update_display_data", cell)[-1] == "[0] 0: 5/5\n[1] 0: 5/5"
        assert len(of("display_data", cell)) == 1


def test_bars_are_whole_lines_when_output_is_captured(tmp_path: Path) -> None:
    file = str(tmp_path / "go")
    Path(f"{file}0").touch()
    calls = [f"elastic_launch(settings(show='all'), bars)({file!r})", f"p.run(bars, {file!r})"]
    _, *captured, redirected = messages_of(
        "p = pool(2, group=None, preload=(), show='all')",
        *[f"%%capture kept{number}\n{call}\nNone" for number, call in enumerate(calls)],
        f"with contextlib.redirect_stdout(io.StringIO()) as stream:\n    {calls[0]}\n    {calls[1]}\n"
        "p.close()\n"
        "print(kept0.stdout + kept1.stdout + stream.getvalue(), len(kept0.outputs), len(kept1.outputs))",
    )

    assert captured == [[("kept", "")]] * 2
    assert_lines(lines(redirected), times=4)
    assert lines(redirected)[-1].strip() == "0 0"


def test_cell_reports_missing_output_as_long_as_none_arrives(tmp_path: Path) -> None:
    setup = """
_callers_stream.FIRST_REPORT = 0.3

def waits(file):
    print("begin", flush=True)
    wait(file)
    print("end", flush=True)

def later(file, *texts):
    shown.clear()  # an earlier cell may have reported it twice
    threading.Thread(target=go, args=(file, *texts)).start()
    return file
"""
    files = [str(tmp_path / name) for name in "abc"]
    _, called, started, pooled = messages_of(
        setup,
        f"elastic_launch(settings(), waits)(later({files[0]!r}, 'runs, but'))\nNone",
        f"elastic_launch(settings(show='all'), waits).start(later({files[1]!r}, 'runs, but')).result()\nNone",
        "with pool(2, group=None, preload=()) as p:\n    time.sleep(1)\n    p.run(print, 'first')\n"
        f"    time.sleep(1)\n    shown.clear()\n    p.run(waits, later({files[2]!r}, 'runs, but'))",
    )

    for cell, name, who, what in (
        (called, "waits", "rank 0 has", "interrupt the kernel to end it"),
        (started, "waits", "no rank has", "elasticlib.jobs()"),
        (pooled, "pool", "rank 0 has", "pool.job.stacks()"),
    ):
        texts, notes = of("display_data", cell), [each for each in cell if each[0].endswith("display_data")]
        assert texts  # twice, where a worker takes long to begin
        assert all(text.startswith(f"[job '{name}' runs, but {who} written") and what in text for text in texts)
        assert notes[-1] == ("update_display_data", "")
        assert any(kind == "stream" and "end" in text for kind, text in cell[cell.index(notes[-1]) :])
        assert {"begin", "end"} <= {line.split()[-1] for line in lines(cell)}


def test_silence_is_not_reported_if_output_is_hidden_or_captured(tmp_path: Path) -> None:
    setup = """
_callers_stream.FIRST_REPORT = 0.1

def sleeps():
    time.sleep(1)
"""
    _, hidden, captured, redirected, kept = messages_of(
        setup,
        "elastic_launch(settings(show=()), sleeps)()\nNone",
        "%%capture kept\nelastic_launch(settings(), sleeps)()\nNone",
        "with contextlib.redirect_stdout(io.StringIO()) as stream:\n    elastic_launch(settings(), sleeps)()\nNone",
        "print(kept.stdout, stream.getvalue(), len(kept.outputs))",
    )

    assert [hidden, captured, redirected] == [[("kept", "")]] * 3
    assert "".join(lines(kept)).strip() == "0"


def test_a_rank_has_a_text_bar_where_the_cell_would_have_a_widget() -> None:
    """Of ``tqdm.notebook``, whether ``ipywidgets`` is there or not."""
    pytest.importorskip("tqdm")
    uses = """
from tqdm.notebook import tqdm as of_cell, trange

def shows():
    from tqdm.notebook import tqdm
    from tqdm.auto import tqdm as chosen
    for bar in (tqdm, of_cell, chosen):
        for step in bar(range(2), desc=bar.__module__):
            pass
    for step in trange(3):
        pass
"""
    _, shown = messages_of(uses, "elastic_launch(settings(1), shows)()\nNone")
    text = "".join(of("stream", shown))

    assert re.findall(r"\d+%", text)[-1] == "100%"
    assert text.count("2/2 [") == 3 and text.count("3/3 [") == 1
    assert not re.search("HBox|IProgress|Warning", text)
    assert not of("display_data", shown)
