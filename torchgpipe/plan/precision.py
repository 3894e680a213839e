"""Describe the precision in which a planned model trains, and check the arguments that set it."""

import torch
from torch.nn import Module

from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.hardware.hardware import Hardware


def precision_of(
    counts: Counts, hardware: Hardware, autocast: torch.dtype | None, *, master_weights: bool
) -> str:
    """Return the dtypes in which matrix products are computed, as text such as "float32 and TF32".

    Args:
        counts: The model's layers, with the dtypes of their operators.
        hardware: The node. Products are in float32, and not in TF32, if the node's devices are
            CPUs, or if its description has peak rates for other dtypes but none for TF32.
        autocast: The dtype of autocast, if it is enabled.
        master_weights: Whether the optimizer keeps a float32 copy of the parameters.
    """
    if autocast is not None:
        return f"autocast to {str(autocast).removeprefix('torch.')}"
    types = set()
    for layer in counts.low:
        types |= {operator.dtype for operator in layer.forward if operator.flops}
    without_tf32 = hardware.peak and "tf32" not in hardware.peak
    if "tf32" in types and (hardware.cpu or without_tf32):
        types -= {"tf32"}
        types |= {"float32"}
    named = [name.replace("tf32", "TF32") for name in sorted(types)]
    text = " and ".join(named) or "no matrix products"
    return f"{text}, float32 master weights" if master_weights else text


def check_precision(module: Module, autocast: torch.dtype | None, *, master_weights: bool) -> None:
    """Raise `ValueError` if `autocast` or `master_weights` is wrong, or does not fit the module.

    Args:
        module: The layers.
        autocast: The dtype of autocast.
        master_weights: Whether the optimizer keeps a float32 copy of the parameters.
    """
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be torch.float16 or torch.bfloat16, got {autocast!r}")
    if not master_weights:
        return
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.element_size() != 2:
            raise ValueError(
                "master_weights is for parameters in 16 bits, but the module has others: "
                "leave out master_weights, because those need no float32 copy"
            )
