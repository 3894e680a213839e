"""Work out how much of a device's memory tensors may take, so that its allocator has room beside them.

PyTorch's caching allocator on a GPU keeps what it has asked for: freed blocks that are too small or too large for the
next tensor stay reserved. In the papers' tables of memory, it reserved 2 to 22 % more than the tensors that are
predicted for them (results/predicted), libraries' workspaces included; the median is 14 %. On a CPU, freed memory goes
back to the system.
"""

from torchgpipe.plan.hardware.hardware import Hardware

HEADROOM = 0.15
"""What a GPU's allocator is taken to reserve beyond tensors, as a share of these: the median, rounded up."""


def room(memory: float, hardware: Hardware, headroom: float | None = None) -> float:
    """Return the bytes that tensors may take of a device's `memory`; without `headroom`, `HEADROOM` on a GPU."""
    if headroom is None:
        headroom = 0.0 if hardware.cpu else HEADROOM
    return (memory - hardware.workspace) / (1 + headroom)
