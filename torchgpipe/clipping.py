"""Clip gradients by their total norm, if each rank has the gradients of only some parameters."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from torchgpipe.tensors import accelerator

Exchange = Callable[[Tensor], list[Tensor]]
"""Sends this rank's tensor to all ranks, and returns the tensors of all ranks, in rank order."""


def clip_gradients(
    partitions: Mapping[int, nn.Module],
    copies: Collection[nn.Parameter],
    exchange: Exchange,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Clip this rank's gradients by the total norm of all ranks' gradients; return the total norm.

    Args:
        partitions: The partitions of this rank, by their indices in the model, in order.
        copies: Parameters that this rank shares with another rank. The other rank counts their
            gradients in the norm, so this rank leaves them out.
        exchange: A function that sends this rank's tensor to all ranks, and returns the tensors of
            all ranks.
        max_norm: The largest allowed norm.
        norm_type: The kind of norm: 2 is the Euclidean norm, infinity the largest absolute value.
    """
    places: dict[nn.Parameter, int] = {}
    for j, partition in partitions.items():
        for p in partition.parameters():
            places.setdefault(p, j)  # partitions can share a parameter
    given = [p for p in places if p.grad is not None]
    counted = [p for p in given if p not in copies]
    norms: list[Tensor] = []
    for p in counted:
        assert p.grad is not None
        norm = torch.linalg.vector_norm(p.grad, norm_type)
        # The norm of a DTensor is a DTensor.
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    # A rank that has only copies computes the total on the same kind of device as other ranks.
    here = given[0].device if given else torch.device("cpu")
    own = torch.stack([x.to(here) for x in norms]) if norms else torch.zeros(0, device=here)
    # A copy from pinned memory does not make the host wait for the backward on a GPU.
    pinned = accelerator.has_streams(here)
    numbers = [places[p] for p in counted]
    own_places = torch.tensor(numbers, dtype=own.dtype, device="cpu", pin_memory=pinned)
    own_places = own_places.to(here, non_blocking=True)
    # Each rank sends two rows of equal length: the norms, and the partitions of their parameters.
    found = [x.to(here).unflatten(0, (2, -1)) for x in exchange(torch.cat([own, own_places]))]
    all_norms, all_places = torch.cat(found, dim=1)
    # Sort the norms by the order of the partitions in the model. So the total norm does not depend,
    # not even in its last bit, on which rank has which layers.
    order = all_places.argsort(stable=True)
    total: Tensor = all_norms.new_zeros(())  # the largest of no norms is not defined
    if len(all_norms):
        total = torch.linalg.vector_norm(all_norms[order], norm_type)
    # One call clips plain gradients (their mesh is None here), or the DTensors of one mesh.
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for p in given:
        by_mesh.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    for alike in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, total)
    return total
