"""Options whose defaults come from the environment."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from elasticlib.argparse_util import check_env, env


def parsed(*arguments: str, **option: Any) -> Any:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-f", "--foo-bar", **option)
    return parser.parse_args(arguments).foo_bar


@pytest.mark.parametrize(
    ("variable", "arguments", "expected"),
    [(None, (), "built-in"), ("env", (), "env"), ("env", ("-f", "line"), "line"), ("", (), "")],
)
def test_command_line_overrides_environment_which_overrides_default(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, arguments: tuple[str, ...], expected: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("PET_FOO_BAR", variable)

    assert expected == parsed(*arguments, action=env, default="built-in")


def test_a_value_from_the_environment_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_FOO_BAR", "7")

    assert 7 == parsed(action=env, type=int)


def test_a_value_from_the_environment_is_not_required_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parsed(action=env, required=True)
    monkeypatch.setenv("PET_FOO_BAR", "env")

    assert "env" == parsed(action=env, required=True)


def test_environment_value_that_is_not_a_choice_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PET_FOO_BAR", "3")
    assert 3 == parsed(action=env, type=int, choices=[1, 3])
    assert "" == caplog.text

    assert 3 == parsed(action=env, type=int, choices=[1, 2])
    assert "PET_FOO_BAR='3' is not one of 1, 2: it is used anyway" in caplog.text


@pytest.mark.parametrize(
    ("variable", "arguments", "expected"),
    [(None, (), False), ("1", (), True), ("0", (), False), ("0", ("-f",), True), ("2", (), True)],
)
def test_a_flag_is_on_by_the_command_line_or_by_a_number(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, arguments: tuple[str, ...], expected: bool
) -> None:
    if variable is not None:
        monkeypatch.setenv("PET_FOO_BAR", variable)

    assert expected is parsed(*arguments, action=check_env)


@pytest.mark.parametrize("text", ["true", "", "yes"])
def test_flag_variable_with_a_text_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PET_FOO_BAR", text)

    with pytest.raises(ValueError, match=f"PET_FOO_BAR='{text}' is neither 1"):
        parsed(action=check_env)
