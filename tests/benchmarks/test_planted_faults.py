"""Faults are planted where they are said to be, survivors are named as they are, and some of all are found."""

from __future__ import annotations

import ast
import random
import textwrap

import pytest

from tests.benchmarks.planted_faults import campaign, everything, source_with, sources
from tests.benchmarks.planter import Planted, faults, plant
from tests.benchmarks.survivors import BY_HAND, SURVIVORS

SOURCE = textwrap.dedent(
    '''
    def step(state, event, now):
        """What follows."""
        state = evolve(state, count=state.count + 1)
        if event.kind == "tick" and now > state.at:
            self.events += (event,)
            out.append(Tick() if state.late else None)
        return evolve(state, seen=now, at=0.0), (Stop(), *more)

    def is_late(self) -> bool:
        return any(each.at < 3 for each in self.known if each.there)
    '''
)
NAMES = [
    "step: state stays",
    "step: not (event.kind == 'tick' and now > state.at)",
    "step: not (event.kind == 'tick')",
    "step: not (now > state.at)",
    "step: without self.events += (event,)",
    "step: without out.append(Tick() if state.late else None)",
    "step: not (state.late)",
    "step: without the action Stop()",
    "step: without the action *more",
    "step: seen stays, not now",
    "step: at stays, not 0.0",
    "is_late: not (each.at < 3)",
    "is_late: not (each.there)",
]


def test_every_condition_update_and_action_makes_a_fault() -> None:
    assert NAMES == [f"{each.where}: {each.what}" for each in faults("x.py", SOURCE)]


def test_each_fault_changes_the_source_and_leaves_it_one() -> None:
    planted = [plant(SOURCE, number) for number in range(len(NAMES))]

    assert len({ast.dump(ast.parse(each)) for each in (SOURCE, *planted)}) == len(NAMES) + 1


def test_planted_faults_have_names_of_their_own_and_compile() -> None:
    planted = everything()

    assert len(planted) > 500
    assert len({str(each) for each in planted}) == len(planted)
    for each in random.Random(0).sample(planted, 20):
        compile(source_with(each), str(each), "exec")


def test_each_survivor_is_planted_and_has_a_reason_of_one_line() -> None:
    assert set() == set(SURVIVORS) - {str(each) for each in everything()}
    assert all(reason and "\n" not in reason for reason in SURVIVORS.values())


def test_fault_written_by_hand_replaces_exactly_one_place() -> None:
    texts = sources()

    assert {1} == {texts[file].count(old) for file, old, _ in BY_HAND.values()}
    assert all(Planted(file, "by hand", what) in everything() for what, (file, _, _) in BY_HAND.items())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(20))
def test_faults_are_found_by_the_simulation_alone(seed: int) -> None:
    chosen = [each for each in everything() if str(each) not in SURVIVORS]

    found = campaign(random.Random(seed).sample(chosen, 1), sound=True)

    assert [] == [str(each.planted) for each in found if not each.by]
