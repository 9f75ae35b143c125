"""The recording that README shows: the drawing is that of the recording, which shows a kill and a restart."""

from __future__ import annotations

import json
import re

from tests.docs.recording import CAST, COMMAND, SVG, drawn


def test_the_drawing_is_that_of_the_recording() -> None:
    assert drawn(CAST.read_text(encoding="utf-8")) == SVG.read_text(encoding="utf-8")


def test_recording_shows_a_kill_and_a_restart_from_a_checkpoint() -> None:
    header, *events = map(json.loads, CAST.read_text(encoding="utf-8").splitlines())
    output = "".join(text for _, _, text in events)

    assert COMMAND == header["command"]
    assert [str(epoch) for epoch in range(1, 9)] == re.findall(r"^epoch (\d)/8 loss", output, re.MULTILINE)
    killed, resumed = (
        output.index("was ended by SIGKILL (signal 9); restart 1 of 1"),
        output.index("resumed from epoch 2"),
    )
    assert output.index("epoch 2/8") < killed < resumed < output.index("epoch 3/8")


def test_readme_shows_it_and_the_command() -> None:
    readme = (CAST.parents[2] / "README.md").read_text(encoding="utf-8")

    assert f"](elasticlib/docs/{SVG.name})" in readme
    assert COMMAND.replace("train_digits.py", "notebooks/train_digits.py") in readme
