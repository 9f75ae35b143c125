"""A program whose own functions and classes are launched: run as a file, and from stdin as a notebook's cells are."""

import atexit
import io
import pickle
import sys
import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch

SCALE = 3


class Scaled(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * SCALE


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


class Note:
    def __init__(self, text: str) -> None:
        self.text = text


class OddError(Exception):
    pass


def save() -> None:
    buffer = io.BytesIO()
    torch.save(Net(), buffer)
    buffer.seek(0)
    assert isinstance(torch.load(buffer, weights_only=False), Net)
    assert isinstance(pickle.loads(pickle.dumps(Note("x"))), Note)


def wait_and_save() -> None:
    threading.main_thread().join()
    save()
    sys.stdout.write("thread pickled\n")  # in one piece: the ranks share a pipe


def save_at_exit() -> None:
    save()
    sys.stdout.write("exit handler pickled\n")


def work(note: Note, net: Net) -> Note:
    assert isinstance(note, Note) and isinstance(net, Net)
    dist.init_process_group("gloo")
    notes: list[Note] = [note, note]
    dist.all_gather_object(notes, Note(f"{note.text} {dist.get_rank()}"))
    for method, count in (("fork", 2), ("spawn", 1)):
        loader = DataLoader(Scaled(), num_workers=count, multiprocessing_context=method)
        assert [0, 3, 6, 9] == torch.cat(list(loader)).tolist()
    save()
    atexit.register(save_at_exit)
    threading.Thread(target=wait_and_save).start()
    dist.destroy_process_group()
    return notes[1 - dist.get_rank() if dist.is_initialized() else 1]


def fail() -> None:
    raise OddError("odd")


if __name__ == "__main__":
    method = sys.argv[1]
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, start_method=method)
    results = elastic_launch(config, work)(Note("hello"), Net())
    assert [("hello 1", True)] * 2 == [(note.text, type(note) is Note) for note in results.values()]
    try:
        elastic_launch(config, fail)()
    except ChildFailedError as error:
        assert type(error.__cause__) is OddError, repr(error.__cause__)
        assert "OddError: odd" in str(error)
    else:
        raise AssertionError("the failure was lost")
    print("all well", flush=True)
