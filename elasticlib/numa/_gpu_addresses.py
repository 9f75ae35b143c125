"""
The PCI addresses of accelerators, by torch's index.

The file is also a program that prints the addresses, for a process that must not use a device
itself. For that reason it needs nothing but torch.
"""

from __future__ import annotations

from json import dumps
from typing import Any


def gpu_addresses_here() -> list[str]:
    """
    Return PCI addresses, such as ``0000:dc:00.0``, of the devices that this process sees.

    They are those of torch's accelerator (CUDA, ROCm, XPU ...). The call initialises the devices'
    library in this process.
    """
    import torch

    if not torch.accelerator.is_available():
        return []
    properties = _module(torch).get_device_properties
    facts: list[Any] = [properties(index) for index in range(torch.accelerator.device_count())]
    # torch does not report the function of the device, which is 0 for a GPU.
    return [f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0" for each in facts]


def is_initialised(torch: Any) -> bool:
    """Return whether this process has used a device of torch's accelerator, without using one."""
    if torch.accelerator.current_accelerator() is None:
        return False
    is_initialized = getattr(_module(torch), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _module(torch: Any) -> Any:
    """Return torch's module for its accelerator, such as ``torch.cuda``."""
    return torch.get_device_module(torch.accelerator.current_accelerator())


if __name__ == "__main__":
    print(dumps(gpu_addresses_here()))
