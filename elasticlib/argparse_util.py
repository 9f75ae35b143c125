"""
Options of a command line with defaults from the environment, for argparse parsers of any program.

(torch: ``torch.distributed.argparse_util``)
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from elasticlib.errors import ConfigError

_log = logging.getLogger("elasticlib")


class env(argparse.Action):  # noqa: N801 - torch's name
    """
    An option that takes its value from the command line, else from ``PET_<DEST>``, else from *default*.

    ``DEST`` is the name of the option's value in upper case. A value from the environment goes through the
    option's *type* and fulfils *required*. A value outside *choices* is accepted, with a warning.

        parser.add_argument("-f", "--foo", action=env, default="bar")
    """

    def __init__(self, dest: str, default: Any = None, required: bool = False, **kwargs: Any) -> None:
        name = _variable(dest)
        text = os.environ.get(name)
        if text is not None:
            _warn_of_other_choice(name, text, kwargs.get("type") or str, kwargs.get("choices"))
        value = default if text is None else text
        super().__init__(dest=dest, default=value, required=required and not value, **kwargs)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Take the value from the command line."""
        del parser, option_string
        setattr(namespace, self.dest, values)


class check_env(argparse.Action):  # noqa: N801 - torch's name
    """
    A flag that is on if the command line has it, or if ``PET_<DEST>`` is a number other than 0.

    Without either it is *default*. Adding the flag raises `ConfigError` (a ``ValueError``) if the
    variable is not a number.

        parser.add_argument("--verbose", action=check_env)
    """

    def __init__(self, dest: str, default: bool = False, **kwargs: Any) -> None:
        name = _variable(dest)
        text = os.environ.get(name, "1" if default else "0")
        try:
            is_on = bool(int(text))
        except ValueError:
            raise ConfigError(f"{name}={text!r} is neither 1 (on) nor 0 (off): change it, or unset it") from None
        super().__init__(dest=dest, nargs=0, const=True, default=is_on, **kwargs)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Turn the flag on."""
        del parser, values, option_string
        setattr(namespace, self.dest, self.const)


def _warn_of_other_choice(name: str, text: str, to_value: Callable[[str], Any], choices: Iterable[Any] | None) -> None:
    # The parser itself reports a text that the type refuses.
    with contextlib.suppress(TypeError, ValueError, argparse.ArgumentTypeError):
        if choices is not None and to_value(text) not in choices:
            _log.warning("%s=%r is not one of %s: it is used anyway", name, text, ", ".join(map(str, choices)))


def _variable(dest: str) -> str:
    return f"PET_{dest.upper()}"


__all__ = ["check_env", "env"]
