"""Notes: which modules use something that a recording cannot repeat, such as random states."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchgpipe.trace.refuse import Where, refused

Notes = dict[Module, tuple[str, Where]]
"""For each module, the name of something that cannot be recorded, and the line that uses it."""

CHECKPOINT = "torch.utils.checkpoint"
"""The note of a module that checkpoints a part of its forward."""

# Functions that cannot be recorded: their results can differ when the layers run, or they do more
# than return a result. A recorder sees the use of an attribute as a call of `__get__` or `__set__`.
NOTED: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
}
for name in ("requires_grad", "is_leaf", "grad_fn", "grad", "_base"):
    NOTED[getattr(Tensor, name).__get__] = name
for name in ("requires_grad", "grad", "data"):
    NOTED[getattr(Tensor, name).__set__] = name
for name in (
    "is_contiguous",
    "stride",
    "storage_offset",
    "dim_order",
    "_is_view",
    "is_inference",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "backward",
):
    NOTED[getattr(Tensor, name)] = name


def check_notes(root: Module, notes: Notes) -> None:
    """Raise an error if a module uses something that a recording cannot repeat.

    Only reading the mode (`training`) is allowed, because the calls are recorded again for the
    other mode.
    """
    for what, at in notes.values():
        if what != "training":
            if what == CHECKPOINT:
                why = f"it calls {what}, which a recording cannot repeat"
                raise refused(
                    root,
                    at,
                    why,
                    "leave out this call, because the pipeline does its own checkpointing: "
                    "GPipe(…, checkpoint='always'); or call it in a small submodule, and keep this "
                    "submodule as one layer: sequential(…, whole=[ItsClass])",
                ) from None
            why = (
                f"it sets or asks for {what}, which cannot be recorded: it may be different, or "
                "have no effect, when the layers run"
            )
            raise refused(
                root, at, why, "do that in a submodule, which is then kept as one layer"
            ) from None
