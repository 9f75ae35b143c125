"""Which handler a name stands for."""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous import (
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)

BUILT_IN = {"c10d", "static", "etcd", "etcd-v2", "etcd-v3"}


class Handler(RendezvousHandler):
    """One that does nothing."""

    def __init__(self, params: RendezvousParameters) -> None:
        self.params = params

    def get_backend(self) -> str:
        return "mine"

    def next_rendezvous(self) -> RendezvousInfo:
        raise NotImplementedError

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.params.run_id

    def shutdown(self) -> bool:
        return True


def params(backend: str = "mine", **options: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "localhost:0", "job", 1, 2, **options)


@pytest.fixture
def registry() -> RendezvousHandlerRegistry:
    return RendezvousHandlerRegistry()


def test_a_registered_creator_makes_the_handlers_of_its_back_end(registry: RendezvousHandlerRegistry) -> None:
    wanted = params()
    registry.register("mine", Handler)

    handler = registry.create_handler(wanted)

    assert isinstance(handler, Handler)
    assert handler.params is wanted


def test_an_empty_name_is_refused(registry: RendezvousHandlerRegistry) -> None:
    with pytest.raises(ConfigError, match="backend=''"):
        registry.register("", Handler)


def test_the_same_creator_may_be_registered_again(registry: RendezvousHandlerRegistry) -> None:
    registry.register("mine", Handler)
    registry.register("mine", Handler)

    assert ("mine",) == registry.names()


def test_a_second_creator_of_one_name_is_refused_and_the_first_stays(registry: RendezvousHandlerRegistry) -> None:
    registry.register("mine", Handler)

    with pytest.raises(ConfigError, match=r"'mine' is already registered, to .*Handler"):
        registry.register("mine", lambda params: Handler(params))
    assert isinstance(registry.create_handler(params()), Handler)


def test_an_unknown_back_end_is_named_beside_those_that_are_known(registry: RendezvousHandlerRegistry) -> None:
    registry.register("mine", Handler)

    with pytest.raises(ValueError, match="'redis' is not registered: give one of mine"):
        registry.create_handler(params("redis"))


def test_handler_with_another_backend_name_raises_runtime_error(registry: RendezvousHandlerRegistry) -> None:
    registry.register("yours", Handler)

    with pytest.raises(
        RuntimeError, match=r"'yours' returned a handler whose get_backend\(\) is 'mine': it must be 'yours'"
    ):
        registry.create_handler(params("yours"))


def test_our_own_back_ends_are_registered() -> None:
    assert set(rendezvous_handler_registry.names()) >= BUILT_IN


def test_a_built_in_name_gives_a_handler_of_that_job_without_any_contact() -> None:
    handler = get_rendezvous_handler(params("c10d"))

    assert ("c10d", "job", 0, False) == (
        handler.get_backend(),
        handler.get_run_id(),
        handler.num_nodes_waiting(),
        handler.is_closed(),
    )


def test_unknown_options_of_a_back_end_are_named_with_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    get_rendezvous_handler(params("c10d", join_timeou=3))

    assert 1 == len(caplog.records)
    assert "did you mean join_timeout?" in caplog.text
