"""Start data of a worker: channels do not change it, and each start sends only its own data."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, strategies as st

from elasticlib.workers.child._start_spec import Handed, StartSpec, both, from_both

_texts = st.text(max_size=5)
_variables = st.dictionaries(_texts, _texts, max_size=3)
SPECS = st.builds(
    StartSpec,
    kind=st.sampled_from(["function", "script", "package", "module", "program"]),
    argv=st.lists(_texts, max_size=3),
    shared=st.none() | st.lists(_texts, max_size=2),
    env=_variables,
    variables=_variables,
    affinity=st.lists(st.integers(0, 7), max_size=3),
    bound=st.booleans(),
    local_rank=st.integers(-1, 9),
    server=st.none() | _texts,
    stdout=st.none() | _texts,
)
HANDED = Handed(
    environment={"RANK": "0"}, streams=[3, 4, 5], report=6, identity=(1, 2), faults=7, tail=8, notices=9,
    notices_identity=(1, 3), release=11, release_identity=(1, 4), spawner=77, memories={"function": 10}, inherit=[6, 7],
)  # fmt: skip


def over_a_channel(body: Any) -> Any:
    return json.loads(json.dumps(body))


@given(SPECS, SPECS)
def test_a_spec_is_the_common_one_and_its_differences(common: StartSpec, spec: StartSpec) -> None:
    assert spec == common.with_differences(over_a_channel(spec.differences(common)))


@given(SPECS)
def test_a_worker_like_all_others_differs_by_its_number_alone(common: StartSpec) -> None:
    assert {"local_rank": 10} == replace(common, local_rank=10).differences(common)


@given(SPECS)
def test_a_new_interpreter_finds_both_as_they_were(spec: StartSpec) -> None:
    body = over_a_channel(both(spec, HANDED))

    found, handed = from_both(body)

    assert body == over_a_channel(both(found, handed))
    assert HANDED == handed


def test_own_variables_beat_the_fork_servers_which_beat_the_launchers() -> None:
    spec = StartSpec(env={"A": "1", "B": "1", "C": "1", "D": "1"}, variables={"C": "3", "D": "3"})

    assert {"A": "1", "C": "3", "D": "3"} == spec.environment({"B": None, "C": "2", "D": None})
