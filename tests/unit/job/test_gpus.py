"""Which GPUs a job gets: what it asks for, else all that others do not have."""

from __future__ import annotations

import pytest

from elasticlib.errors import ConfigError, JobRunsError
from elasticlib.job._gpu_shares import GpuShare, choose, seen_by, showing

SEEN = ("4", "5", "6", "7")


def taken(*gpus: str, may_be_shared: bool = False) -> GpuShare:
    return GpuShare("job 'other'", gpus, may_be_shared)


@pytest.mark.parametrize(
    ("environment", "present", "expected"),
    [
        ({}, 2, ("0", "1")),
        ({}, 0, ()),
        ({}, None, None),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, 8, ("3", "1")),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None, ("3",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 8, ("0",)),
        ({"CUDA_VISIBLE_DEVICES": "0,,1"}, 8, ("0",)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 0, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2"}, None, ("2",)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-1"}, 8, ("GPU-8932f937", "MIG-1")),
    ],
)
def test_a_program_sees_what_its_variables_list_of_the_gpus_that_are_there(
    environment: dict[str, str], present: int | None, expected: tuple[str, ...] | None
) -> None:
    assert seen_by(environment, present) == expected


def test_indices_are_of_what_the_program_sees_and_names_are_the_drivers() -> None:
    assert choose([1, "GPU-8932f937"], 2, SEEN, (), may_share=False) == ("5", "GPU-8932f937")


def test_empty_devices_get_no_gpu_even_if_others_have_all() -> None:
    assert choose([], 2, SEEN, [taken(*SEEN)], may_share=False) == ()


def test_job_without_devices_setting_gets_all_gpus_others_do_not_use() -> None:
    assert choose(None, 2, SEEN, [taken("5")], may_share=False) == ("4", "6", "7")
    assert choose(None, "auto", SEEN, [taken("4", "5", "6")], may_share=False) == ("7",)


@pytest.mark.parametrize(("workers", "others"), [(4, ["5"]), (1, SEEN), ("auto", SEEN), ("gpu", SEEN)])
def test_a_job_with_fewer_gpus_left_than_workers_is_refused_by_name(workers: int | str, others: list[str]) -> None:
    with pytest.raises(JobRunsError, match=r"nproc_per_node=.* 5.* taken by job 'other'.*devices="):
        choose(None, workers, SEEN, [taken(*others)], may_share=False)


def test_gpu_that_another_job_has_is_refused_by_name() -> None:
    with pytest.raises(JobRunsError, match=r"devices=\[0, 1\]: GPU 5 is taken by job 'other'"):
        choose([0, 1], 1, SEEN, [taken("5")], may_share=False)


def test_calls_without_devices_share_gpus_as_programs_do() -> None:
    assert choose(None, 4, SEEN, [taken(*SEEN, may_be_shared=True)], may_share=True) == SEEN


def test_a_started_job_shares_with_no_call() -> None:
    with pytest.raises(JobRunsError):
        choose(None, 4, SEEN, [taken(*SEEN, may_be_shared=True)], may_share=False)


@pytest.mark.parametrize("seen", [(), None])
def test_no_gpus_are_chosen_if_none_are_known(seen: tuple[str, ...] | None) -> None:
    assert choose(None, 4, seen, [taken(*SEEN)], may_share=False) is None


def test_workers_that_are_counted_by_cpus_need_no_gpu() -> None:
    assert choose(None, "cpu", SEEN, [taken(*SEEN)], may_share=False) is None


def test_devices_are_taken_as_requested_if_gpus_are_unknown() -> None:
    assert choose([7, 0], 2, None, (), may_share=False) == ("7", "0")


@pytest.mark.parametrize(
    ("devices", "seen", "message"),
    [
        ([4], SEEN, "GPUs 0 to 3"),
        ([1], ("3",), "GPU 0 only"),
        ([0], (), "no GPU"),
        ([1, 1], SEEN, "twice"),
        ([1, "5"], SEEN, "twice"),
    ],
)
def test_missing_or_repeated_gpu_is_refused(devices: list[int | str], seen: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"devices=.*{message}"):
        choose(devices, 1, seen, (), may_share=False)


def test_rocm_is_shown_the_same_where_its_own_list_is_set() -> None:
    assert showing(["2", "3"], {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert showing(["2"], {"HIP_VISIBLE_DEVICES": "0"}) == {"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"}


NAMES = {"0": "GPU-8932f937-d72c", "1": "GPU-8932f999-aaaa", "2": "GPU-1111"}


@pytest.mark.parametrize(
    ("device", "devices"),
    [
        ("GPU-8932f937-d72c", [0]),
        ("0", ["GPU-8932f937-d72c"]),
        ("00", ["GPU-8932f937"]),
        ("GPU-8932f937", ["GPU-8932f937-d72c"]),
        ("GPU-1", [2]),
    ],
)
def test_a_gpu_is_the_same_by_index_by_name_and_by_the_first_of_it(device: str, devices: list[int | str]) -> None:
    with pytest.raises(JobRunsError, match="is taken by job 'other'"):
        choose(devices, 1, ("0", "1", "2"), [taken(device)], may_share=False, names=NAMES)


def test_job_without_devices_setting_gets_no_gpu_taken_by_name() -> None:
    others = [taken("GPU-8932f999-aaaa")]

    assert choose(None, 2, ("0", "1", "2"), others, may_share=False, names=NAMES) == ("0", "2")
    with pytest.raises(JobRunsError, match="nproc_per_node=3: GPU 1 is taken by job 'other'"):
        choose(None, 3, ("0", "1", "2"), others, may_share=False, names=NAMES)
    seen = tuple(NAMES.values())
    assert choose(None, 2, seen, [taken("1")], may_share=False, names=NAMES) == (seen[0], seen[2])


def test_index_and_name_of_one_gpu_name_it_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        choose([0, "GPU-8932f937"], 1, ("0", "1"), (), may_share=False, names=NAMES)


def test_ambiguous_name_matches_no_gpu_and_other_gpus_are_free() -> None:
    assert choose(["GPU-8932f9"], 1, ("0", "1"), [taken("0")], may_share=False, names=NAMES) == ("GPU-8932f9",)
    assert choose(["GPU-1111"], 1, ("0", "1"), [taken("0")], may_share=False, names=NAMES) == ("GPU-1111",)
    assert choose(["MIG-1"], 1, ("0",), [taken("0")], may_share=False, names=NAMES) == ("MIG-1",)
