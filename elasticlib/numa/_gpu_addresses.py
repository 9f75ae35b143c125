"""
Where the accelerators sit: their PCI addresses, by the index that torch gives them.

It is a program too, which prints the addresses: run it where the asking process must not touch a device. For that
reason it needs nothing but torch.
"""

from __future__ import annotations

from json import dumps
from typing import Any


def gpu_addresses_here() -> list[str]:
    """
    PCI addresses such as ``0000:dc:00.0`` of the devices of torch's accelerator (CUDA, ROCm, XPU ...), as seen here.

    It initialises the devices' library in this process.
    """
    import torch

    if not torch.accelerator.is_available():
        return []
    properties = _module(torch).get_device_properties
    facts: list[Any] = [properties(index) for index in range(torch.accelerator.device_count())]
    return [f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0" for each in facts]


def is_initialised(torch: Any) -> bool:
    """Whether this process has already touched a device of torch's accelerator; it touches none."""
    if torch.accelerator.current_accelerator() is None:
        return False
    is_initialized = getattr(_module(torch), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _module(torch: Any) -> Any:
    """What torch has for its accelerator, such as ``torch.cuda``."""
    return torch.get_device_module(torch.accelerator.current_accelerator())


if __name__ == "__main__":
    print(dumps(gpu_addresses_here()))
