"""The line by which nodes compare what they run: equal for equal arguments alone, short, and without secrets."""

from __future__ import annotations

import pytest

from elasticlib.rendezvous._command import LONGEST, command_line


def test_short_command_is_shown_as_a_shell_takes_it() -> None:
    assert "train.py --name 'two words' --lr=0.1" == command_line("train.py", ["--name", "two words", "--lr=0.1"])


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--hf-token", "hf_abc", "--lr", "1"], "train.py --hf-token ... --lr 1 (arguments "),
        (["--api_key=abc"], "train.py --api_key=... (arguments "),
        (["DB_PASSWORD=abc"], "train.py DB_PASSWORD=... (arguments "),
        (["s3://user:pw@host/x"], "train.py s3://...@host/x (arguments "),
        (["--tokenizer", "bert", "--max-tokens=9"], "train.py --tokenizer bert --max-tokens=9"),
    ],
)
def test_secrets_are_left_out(args: list[str], shown: str) -> None:
    assert command_line("train.py", args).startswith(shown)


def test_commands_that_differ_in_a_secret_or_in_the_middle_differ() -> None:
    assert command_line("w", ["--token=a"]) != command_line("w", ["--token=b"])
    long = [f"--option{number}=1" for number in range(100)]
    other = [*long[:50], "--option50=2", *long[51:]]
    assert command_line("w", long) != command_line("w", other)
    assert len(command_line("w", long)) < LONGEST + 50
