"""A thread and an exit handler that pickle a class of this very script after its last line."""

import atexit
import io
import pickle
import sys
import threading

import torch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def save(when: str) -> None:
    buffer = io.BytesIO()
    torch.save(Net(), buffer)
    buffer.seek(0)
    assert isinstance(torch.load(buffer, weights_only=False), Net)
    assert isinstance(pickle.loads(pickle.dumps(Net())), Net)
    sys.stdout.write(f"pickled in {when}\n")  # in one piece: the ranks share a pipe


def wait_and_save() -> None:
    threading.main_thread().join()
    save("thread")


save("body")
atexit.register(save, "exit handler")
threading.Thread(target=wait_and_save).start()
