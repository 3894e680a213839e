"""Clipping of gradients: by the norm of all of them together, of which a rank knows a part."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

Exchange = Callable[[Tensor], list[Tensor]]
"""Gives this rank's tensor to all ranks; returns those of all, in their order."""


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    stages: Mapping[nn.Parameter, int],
    exchange: Exchange,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Clip the gradients of all ranks together; return their norm.

    Args:
        parameters: The parameters of this rank.
        stages: The stage of each parameter.
        exchange: Gives a tensor to all ranks, and returns those of all.
        max_norm: What the norm shall be at most.
        norm_type: Which norm: 2 for the Euclidean, infinity for the largest.
    """
    given: list[nn.Parameter] = []
    norms: list[Tensor] = []
    for p in parameters:
        if p.grad is None:
            continue
        norm = torch.linalg.vector_norm(p.grad, norm_type)
        # The norm of a DTensor is a DTensor.
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        given.append(p)
    here = norms[0].device if norms else torch.device("cpu")
    own = torch.stack([x.to(here) for x in norms]) if norms else torch.zeros(0)
    places = own.new_tensor([stages[p] for p in given])
    # From each rank two rows of one length: norms, and the stages of their parameters.
    found = [x.to(here).unflatten(0, (2, -1)) for x in exchange(torch.cat([own, places]))]
    all_norms, all_places = torch.cat(found, dim=1)
    # In the model's order, so that any balance has the same norm: other ranks may have stages in
    # between.
    order = all_places.argsort(stable=True)
    total: Tensor = torch.linalg.vector_norm(all_norms[order], norm_type)
    # One operator takes plain gradients, whose mesh is None here, or DTensors of one mesh.
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for p in given:
        by_mesh.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    for alike in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, total)
    return total
