"""Places of ranks that do not end."""

from __future__ import annotations

from elasticlib.testing.ranks._blocked import blocked, describe, in_short

LIBRARY = "/venv/lib/python3.11/site-packages/torch/distributed"
IN_ALL_REDUCE = f"""Current thread 0x00007f0e8f fff (most recent call first):
  File "{LIBRARY}/distributed_c10d.py", line 3005 in all_reduce
  File "{LIBRARY}/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 12 in step
  File "/home/me/test_train.py", line 30 in test_it
  File "/venv/lib/python3.11/site-packages/elasticlib/testing/pytest_plugin/rank/_run.py", line 80 in _called
"""
SLEEPING = """Thread 0x00007f0e8e (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/me/loader.py", line 7 in fetch

Thread 0x00007f0e8f (most recent call first):
  File "/home/me/test_train.py", line 28 in test_it
  File "/venv/lib/python3.11/site-packages/elasticlib/testing/pytest_plugin/rank/_run.py", line 80 in _called
"""


def test_the_collective_and_the_line_that_called_it_are_named() -> None:
    found = blocked(IN_ALL_REDUCE)

    assert "all_reduce" == found.collective()
    assert "train.py:12 in the collective all_reduce" == found.place()
    assert [frame.function for frame in found.frames] == ["all_reduce", "wrapper", "step", "test_it"]


def test_the_thread_of_the_test_is_the_last_and_others_are_a_line() -> None:
    found = blocked(SLEEPING)

    assert "test_train.py:28" == found.place()
    assert ("loader.py:7 in fetch",) == found.others


def test_ranks_at_the_same_place_are_reported_together() -> None:
    lines = describe({0: IN_ALL_REDUCE, 1: SLEEPING, 2: IN_ALL_REDUCE.replace("fff", "eee")})

    assert "ranks 0, 2: train.py:12 in the collective all_reduce" == lines[0]
    assert "rank 1: test_train.py:28" in lines
    assert "    another thread: loader.py:7 in fetch" == lines[-1]


def test_rank_without_an_answer_has_its_reason() -> None:
    assert "rank 0 at (the process is stopped)" == in_short({0: "(the process is stopped)"})
    assert ["rank 0: (no answer)"] == describe({0: "(no answer)"})
