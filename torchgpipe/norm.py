"""The norm of all gradients, which may be on several devices or ranks, and clipping by it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    gather: Callable[[Tensor], list[Tensor]] = lambda norms: [norms],
) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`; return the norm that they had.

    It is the norm of each parameter's norms in the model's order, so that any balance has the same. `gather` adds those
    of other ranks.
    """
    given = [p for p in parameters if p.grad is not None]
    parts = [torch.linalg.vector_norm(p.grad, norm_type) for p in given if p.grad is not None]
    # That of a parameter that FSDP has sharded is in parts, too.
    norms: list[Tensor] = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in parts]
    here = norms[0].device if norms else torch.device("cpu")
    own = torch.stack([x.to(here) for x in norms]) if norms else torch.zeros(0)
    total: Tensor = torch.linalg.vector_norm(torch.cat([x.to(here) for x in gather(own)]), norm_type)
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, total)
    return total
