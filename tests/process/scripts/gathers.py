"""Objects of a class of this script go through ``all_gather_object`` and a DataLoader's workers."""

import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


class Note:
    def __init__(self, rank: int) -> None:
        self.rank = rank


def main() -> None:
    dist.init_process_group("gloo")
    notes: list[Note] = [Note(-1)] * dist.get_world_size()
    dist.all_gather_object(notes, Note(dist.get_rank()))
    assert [note.rank for note in notes] == list(range(dist.get_world_size()))
    for method in sys.argv[1:]:
        loader = DataLoader(Squares(), num_workers=2, multiprocessing_context=method, batch_size=2)
        assert [0, 1, 4, 9, 16, 25, 36, 49] == torch.cat(list(loader)).tolist()
        sys.stdout.write(f"rank {dist.get_rank()} loaded by {method}\n")  # in one piece: the ranks share a pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
