"""`Report`, a layer that records in which PyTorch modes it runs."""

import torch
from torch import Tensor, nn

from torchgpipe import is_checkpointing, is_recomputing


class Report(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        in_inference = torch.is_inference_mode_enabled()
        modes = [in_inference, autocast, torch.get_default_device().type]
        without_grad = not torch.is_grad_enabled() and not is_checkpointing()
        if in_inference or without_grad:
            modes += [torch.is_grad_enabled(), is_checkpointing(), is_recomputing()]
        self.seen.add(str(modes))
        return x


def seen(run: nn.Module) -> list[str]:
    """Return what all `Report` layers have recorded."""
    found: set[str] = set()
    for module in run.modules():
        if isinstance(module, Report):
            found |= module.seen
    return sorted(found)
