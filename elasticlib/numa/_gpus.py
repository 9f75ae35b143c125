"""
Where the GPUs sit: their PCI addresses, by the index that torch gives them.

It is a program too, which prints the addresses: run it where the asking process must not touch a device. For that
reason it needs nothing but torch.
"""

from __future__ import annotations

import json
from typing import Any


def addresses_here() -> list[str]:
    """
    PCI addresses such as ``0000:dc:00.0`` of the CUDA (or ROCm) devices that this process sees.

    It initialises the devices' library in this process.
    """
    import torch

    facts: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in facts]


if __name__ == "__main__":
    print(json.dumps(addresses_here()))
