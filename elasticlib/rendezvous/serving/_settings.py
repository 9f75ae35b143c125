"""Settings of a server of jobs, checked; they can be sent to another process. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict, field, frozen

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.net._endpoint import is_host
from elasticlib.spec import DEFAULT_PORT

MOST_JOBS = 64
_LIMIT = 10_000
"""Jobs at once, at most: each has a thread and three connections."""


def _port(_: object, attribute: object, value: int) -> None:
    if type(value) is not int or not 0 <= value <= 65535:
        raise ConfigError.of_setting("port", f"{value!r:.80}: give a number from 0 to 65535 (0: any free port)")


def _host(_: object, attribute: object, value: str) -> None:
    if value and not is_host(value):
        raise ConfigError.of_setting("host", f"{value!r:.80}: give a name or an address of this machine")


def _jobs(_: object, attribute: object, value: int) -> None:
    if type(value) is not int or not 1 <= value <= _LIMIT:
        raise ConfigError.of_setting("max_jobs", f"{value!r:.80}: give a number from 1 to {_LIMIT}")


@frozen(kw_only=True)
class ServerSettings:
    """Settings of a server; raises a `ConfigError` for a value that breaks its rule."""

    port: int = field(default=DEFAULT_PORT, validator=_port)
    """0: any free port."""
    host: str = field(default="", validator=_host)
    """Name or address of this machine to listen at; empty: all its addresses."""
    max_jobs: int = field(default=MOST_JOBS, validator=_jobs)
    """Jobs at one time."""
    tokens: Sequence[str | None] = field(default=(None,), repr=False)
    """Tokens that jobs may have; None: a job may have none."""

    def plain(self) -> dict[str, Any]:
        """Return a JSON object; ``ServerSettings(**plain)`` makes the settings again."""
        return asdict(self)
