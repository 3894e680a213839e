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
    """Clip the gradients of `parameters`, which are on these `stages`; return the norm of those of all ranks."""
    given = [p for p in parameters if p.grad is not None]
    parts = [torch.linalg.vector_norm(p.grad, norm_type) for p in given if p.grad is not None]
    # The norm of a DTensor is a DTensor.
    norms: list[Tensor] = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in parts]
    here = norms[0].device if norms else torch.device("cpu")
    own = torch.stack([x.to(here) for x in norms]) if norms else torch.zeros(0)
    places = own.new_tensor([stages[p] for p in given])
    found = [x.to(here).unflatten(0, (2, -1)) for x in exchange(torch.cat([own, places]))]
    all_norms, all_places = torch.cat(found, dim=1)
    # In the model's order, so that any balance has the same norm: other ranks may have stages in
    # between.
    order = all_places.argsort(stable=True)
    total: Tensor = torch.linalg.vector_norm(all_norms[order], norm_type)
    # One operator takes plain gradients, whose mesh is None here, or DTensors of one mesh.
    meshes = [getattr(p.grad, "device_mesh", None) for p in given]
    for mesh in {*meshes}:
        alike = [p for p, of in zip(given, meshes, strict=True) if of == mesh]
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, total)
    return total
