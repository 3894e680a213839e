"""Notes of what a recording of a module's calls cannot repeat, such as a use of random states.

A note says which submodule uses such a thing, and in which line.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchgpipe.trace.refuse import Where, refused

Notes = dict[Module, tuple[str, Where]]
"""For each module, the name of something that cannot be recorded, and the line that uses it."""

CHECKPOINT = "torch.utils.checkpoint"
"""The note of a module that checkpoints a part of its forward."""

# Functions that cannot be recorded: they may return something else when the layers run, or they do
# more than return a result. The use of an attribute is a call of its `__get__` or `__set__`.
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
    """Raise `Untraceable` if a module uses something that a recording of its calls cannot repeat.

    Only reading the mode (`training`) is allowed, because the calls are recorded again when the
    mode changes.

    Args:
        root: The module.
        notes: What its submodules use. This is empty if everything can be repeated.
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
                root, at, why, "do that in a submodule, which is then kept whole, as one layer"
            ) from None
