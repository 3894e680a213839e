"""`Everywhere`: a pipeline over ranks that every rank sees whole, so that a test's body runs on all of them alike.

Each rank holds all layers, and computes only its own partition. Outputs, gradients and buffers are then sent to all, so
that each can compare everything. Ranks beyond the pipeline's take part in that only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe._autograd import keeps_graph
from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.microbatch import tensors_of
from torchgpipe.parameters import TOKEN


class Everywhere(nn.Module):
    """A `DistributedGPipe` on the first ranks, one for each partition."""

    def __init__(self, layers: nn.Sequential, balance: Sequence[int], **options: Any) -> None:
        super().__init__()
        n, rank = len(balance), dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("pp",)) if n == dist.get_world_size() else _Part(n)
        self.__dict__["pipe"] = DistributedGPipe(layers, balance, mesh=mesh, **options) if rank < n else None
        self.n, self.rank = n, rank
        self._modules.update(layers._modules)
        owners = [j for j, count in enumerate(balance) for _ in range(count)]
        self._owner = dict(zip(layers._modules, owners, strict=True))
        self.training = layers.training

    def forward(self, value: Any) -> Any:
        given = [x.detach().requires_grad_(x.requires_grad) for x in tensors_of(value)]
        output = self._all(lambda: self.pipe(given[0] if isinstance(value, Tensor) else tuple(given)))
        shown = [y.detach() for y in tensors_of(output)] if self.rank == self.n - 1 else None
        needs = [y.requires_grad for y in tensors_of(output)] if self.rank == self.n - 1 else None
        shown, needs, atomic = _from(self.n - 1, (shown, needs, isinstance(output, Tensor)))
        self._spread_buffers()
        if True in needs:
            own = [p for p in self.parameters()]
            shown = _Shown.apply(self, [output], given, shown, needs, *tensors_of(value), *own)
        return shown[0] if atomic else tuple(shown)

    def train(self, mode: bool = True) -> Everywhere:
        super().train(mode)
        if self.pipe is not None:
            self.pipe.train(mode)
        return self

    def backward(self, output: Any, inputs: list[Tensor], grads: Sequence[Tensor | None], keep: bool) -> list[Any]:
        """Run every rank's backward; return the gradients of inputs and parameters on all."""
        own = [p for p in self.parameters() if p.requires_grad and self._is_own(p)]
        # The token, so that a rank goes backward whose own parameters take no gradient.
        wanted = [*[x for x in inputs if x.requires_grad], *own, TOKEN]

        again = torch.is_grad_enabled()

        def run() -> list[Tensor | None]:
            if self.rank < self.n - 1:
                return [*torch.autograd.grad(output, wanted, allow_unused=True, retain_graph=keep, create_graph=again)]
            pairs = [(y, g) for y, g in zip(tensors_of(output), grads, strict=True) if g is not None]
            outputs, given = zip(*pairs, strict=True)
            return [*torch.autograd.grad(outputs, wanted, given, allow_unused=True, retain_graph=keep, create_graph=again)]

        found = dict(zip(map(id, wanted), self._all(run) or [], strict=False))
        names = {
            name: found.get(id(p)) for name, p in self.named_parameters() if self._is_own(p) and self.rank < self.n
        }
        every = _everyone(([found.get(id(x)) for x in inputs], names))
        merged = {name: grad for _, part in every for name, grad in part.items()}
        return [*every[0][0], *(merged[name] for name, _ in self.named_parameters())]

    def _is_own(self, p: Tensor) -> bool:
        mine = [layer for name, layer in self._modules.items() if self._owner[name] == self.rank]
        return any(p is x for layer in mine for x in layer.parameters())

    def _spread_buffers(self) -> None:
        for name, layer in self._modules.items():
            theirs = _from(self._owner[name], dict(layer.named_buffers()))
            for key, x in layer.named_buffers():
                if self.rank != self._owner[name]:
                    x.copy_(theirs[key])

    def _all(self, run: Callable[[], Any]) -> Any:
        """Return what `run` returns on this rank; raise what it raises on any, rather than what others hear of it."""
        result, error = None, None
        try:
            result = run() if self.rank < self.n else None
        except BaseException as raised:
            error = raised
        errors = [e for e in _everyone(error) if e is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, RankFailed)), errors[0])
        return result


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, model: Everywhere, output: Any, given: Any, shown: Any, needs: Any, *_: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.model, (ctx.output,), ctx.given = model, output, given
        ctx.mark_non_differentiable(*(y for y, need in zip(shown, needs, strict=True) if not need))
        return tuple(shown)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None,) * 5 + tuple(ctx.model.backward(ctx.output, ctx.given, grads, keeps_graph()))


class _Part:
    """The first n ranks, in place of a mesh."""

    def __init__(self, n: int) -> None:
        self._n = n

    def get_group(self) -> Any:
        return dist.new_group(list(range(self._n)), use_local_synchronization=True)


def _from(rank: int, value: Any) -> Any:
    found = [value]
    dist.broadcast_object_list(found, rank)
    return found[0]


def _everyone(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
