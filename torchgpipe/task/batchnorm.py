"""Batch normalization that runs on micro-batches, but updates its statistics once per mini-batch.

The layer keeps the number of values, the mean and the variance of each micro-batch. At the end of
the mini-batch, it combines them by the formula of Chan, Golub and LeVeque ("Algorithms for
computing the sample variance", 1983). The formula does not subtract large sums of squares from each
other, so the variance stays precise even if the mean is far from zero.

All layers of a model are updated together, because this takes only a few operators.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from torchgpipe.modules import modules_of_pipelines
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import backward_id
from torchgpipe.tensors.checkpoint import is_recomputing

__all__ = ["DeferredBatchNorm", "commit"]

Module = TypeVar("Module", bound=nn.Module)
MicroBatchStatistics = tuple[int, Tensor]
"""The number of values per channel in a micro-batch, and a tensor of shape ``(2, channels)``.

The tensor has the means and the unbiased variances.
"""


class DeferredBatchNorm(_BatchNorm):
    """Normalize micro-batches, and update the running statistics once per mini-batch.

    Each micro-batch is normalized with its own mean and variance. The running statistics become the
    same as those of `nn.BatchNorm` with the undivided mini-batch.

    The method `commit` ends the mini-batch and updates the running statistics. `GPipe` calls it
    once after the forward of a mini-batch, even if the layer occurs several times in the model.
    Without `GPipe`, the layer itself calls it after ``chunks`` micro-batches. In evaluation mode
    and during a recomputation, the layer tracks no statistics.

    Args:
        num_features: The number of channels, which is dimension 1 of the input. The input has the
            shape ``(N, C)`` or ``(N, C, ...)``.
        eps, momentum, affine, track_running_stats, device, dtype: The same as for
            `torch.nn.BatchNorm2d`.
        chunks: The number of micro-batches after which the layer calls `commit` itself. With
            `None`, the layer never does.

    Raises:
        ValueError: ``chunks`` is below 1, or a micro-batch in training has only one value per
            channel.
    """

    def __init__(  # noqa: PLR0913 - those of `torch.nn.BatchNorm2d`
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int | None = 1,
        *,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self._defer(chunks, None)

    def _defer(self, chunks: int | None, dimensions: type[_BatchNorm] | None) -> None:
        self.chunks = _checked(chunks)
        self._dimensions = dimensions
        # The tracked statistics are not buffers, because half() could make a variance in a buffer
        # infinite, and because state_dict() must have the same keys as with nn.BatchNorm.
        self._tracked: list[MicroBatchStatistics] = []

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int | None = 1) -> Module:
        """Replace every batch normalization in a module by a deferred one, and return the module.

        A new layer has the parameters, buffers, hooks and mode of the old layer. So optimizers that
        were made before still work, and ``state_dict`` keeps its keys. A layer that occurs twice
        gets one replacement.

        Not replaced are `nn.SyncBatchNorm`, layers that track no running statistics, and layers of
        a pipeline within the module.

        Args:
            module: The module.
            chunks: The argument ``chunks`` of the new layers.

        Returns:
            The module. If the module itself is a batch normalization, its replacement.

        Raises:
            ValueError: ``chunks`` is below 1, or a lazy layer has not had its first input.
            TypeError: The class of a layer overrides ``forward``, ``train`` or ``eval``. The
                replacement would not have the overriding method.
        """
        chunks = _checked(chunks)
        # A pipeline among the layers has its own option `deferred_batch_norm`.
        inner = modules_of_pipelines(module.modules())
        # First make all new layers, and only then put them into the module. So if a layer cannot be
        # converted, the module is unchanged.
        replacements: dict[nn.Module, nn.Module] = {}
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and layer not in inner and _can_defer(layer):
                replacements[layer] = cls._replacement(layer, chunks)
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in replacements:
                    parent._modules[name] = replacements[child]
        return cast(Module, replacements.get(module, module))

    @classmethod
    def _replacement(cls, layer: _BatchNorm, chunks: int | None) -> nn.Module:
        kind = type(layer)
        dimensions: type[_BatchNorm] | None = kind
        if isinstance(layer, DeferredBatchNorm):
            if layer.chunks == chunks:
                return layer
            dimensions = layer._dimensions
        elif isinstance(layer, LazyModuleMixin):
            raise ValueError(
                f"cannot convert {kind.__name__} to a deferred batch norm before its first input: "
                "run the module once, then convert it"
            )
        elif own := _own_methods(kind):
            raise TypeError(
                f"cannot convert {kind.__name__} to a deferred batch norm, because it overrides "
                f"{own[0]}(): use nn.BatchNorm1d, 2d or 3d instead, or do not use deferred batch "
                "normalization"
            )
        deferred = cls.__new__(cls)
        # The old and the new layer share their tensors, but each layer has its own dictionaries of
        # tensors. So if one layer replaces a tensor, as half() replaces buffers, the other layer
        # keeps it.
        for name, value in vars(layer).items():
            deferred.__dict__[name] = copy(value) if isinstance(value, dict | set) else value
        deferred._defer(chunks, dimensions)
        return deferred

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a micro-batch of shape ``(N, C)`` or ``(N, C, ...)``.

        Raises:
            ValueError: If the layer is in training mode, and there is only one value per channel.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        count = input.numel() // max(input.size(1), 1)
        if count == 1:
            raise ValueError(
                "batch normalization needs more than 1 value per channel in every micro-batch, got "
                f"an input of shape {tuple(input.shape)}: use fewer chunks or a larger mini-batch"
            )
        if is_recomputing() or not _tracks(self):
            return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        assert self.running_mean is not None
        # With a momentum of 1, the kernel writes the statistics that it computes into `statistics`.
        statistics = self.running_mean.new_zeros(2, self.running_mean.numel())
        mean, var = statistics
        output = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        # A plain checkpoint of PyTorch within a layer recomputes in the backward. Then the same
        # operators have to run, because PyTorch compares how many tensors they save.
        recomputes = not torch.compiler.is_compiling() and backward_id() != -1
        if count and not recomputes:
            self._tracked.append((count, statistics))
        if len(self._tracked) == self.chunks:
            self.commit()
        return output

    def commit(self) -> None:
        """End the mini-batch: update the running statistics from the tracked micro-batches."""
        commit([self])

    def discard(self) -> None:
        """Forget the tracked micro-batches, and do not update the running statistics."""
        self._tracked = []

    def extra_repr(self) -> str:
        """Return the settings of the layer for `print`: those of `nn.BatchNorm`, and ``chunks``."""
        return f"{super().extra_repr()}, chunks={self.chunks}"  # type: ignore[no-untyped-call]

    def _check_input_dim(self, input: Tensor) -> None:
        if self._dimensions is not None:
            self._dimensions._check_input_dim(self, input)
        elif input.dim() < 2:
            raise ValueError(
                f"expected an input of shape (N, C) or (N, C, ...), got {tuple(input.shape)}"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # torchgpipe 0.0.7 saved the sums of an unfinished mini-batch.
        for name in ("sum", "sum_squares"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _tracks(layer: _BatchNorm) -> bool:
    has_statistics = layer.running_mean is not None and layer.running_var is not None
    return layer.track_running_stats and has_statistics


def _can_defer(layer: _BatchNorm) -> bool:
    return _tracks(layer) and not isinstance(layer, nn.SyncBatchNorm)


def _own_methods(kind: type[_BatchNorm]) -> list[str]:
    """Return the names of the methods `forward`, `train` and `eval` that a class overrides.

    The class is a subclass of PyTorch's batch norms.
    """
    methods = "forward", "train", "eval"
    return [name for name in methods if getattr(kind, name) is not getattr(_BatchNorm, name)]


_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_FORWARDS = {kind.forward for kind in (_BatchNorm, nn.SyncBatchNorm, DeferredBatchNorm)}


def norms_in_training(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return those `modules` that are batch norms in training mode.

    The outputs of these layers do not depend on their running statistics. Subclasses with a
    `forward` or with buffers of their own are left out, because their outputs may depend on them.
    """
    found = set()
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its class has no forward that could be looked at
        is_norm = module.training and type(module).forward in _FORWARDS
        if is_norm and module._buffers and module._buffers.keys() <= _STATISTICS:
            found.add(module)
    return found


_Tracked = tuple[DeferredBatchNorm, list[MicroBatchStatistics]]


@torch.no_grad()
def commit(layers: Iterable[DeferredBatchNorm]) -> None:
    """End the mini-batch of several layers: update the running statistics of all of them together.

    This function submits work to the GPU, but does not wait for the results.
    """
    groups: dict[tuple[object, ...], list[_Tracked]] = defaultdict(list)
    sharing = Counter[Tensor]()
    for layer in layers:
        tracked, mean = layer._tracked, layer.running_mean
        layer.discard()
        if not tracked or mean is None or layer.running_var is None:
            continue
        # Layers that share running statistics update them one after the other.
        sharing[mean] += 1
        cumulative = layer.momentum is None
        uncounted = layer.num_batches_tracked is None
        key = (mean.device, mean.dtype, len(tracked), cumulative, uncounted, sharing[mean])
        groups[key].append((layer, tracked))
    for group in groups.values():
        _update(group)


def _update(group: Sequence[_Tracked]) -> None:
    """Update the running statistics of several layers together.

    The channels of all layers are concatenated, so that each operator runs once for all layers. The
    operators compute in float32, or in the dtype of the statistics if that is more precise.

    Args:
        group: Pairs of a layer and the statistics of its micro-batches.
    """
    layers = [layer for layer, _ in group]
    means_before = [cast(Tensor, layer.running_mean) for layer in layers]
    running = means_before + [cast(Tensor, layer.running_var) for layer in layers]
    device = running[0].device
    dtype = torch.promote_types(running[0].dtype, torch.float32)
    channels = [mean.numel() for mean in means_before]
    batches = [x.num_batches_tracked for x in layers if x.num_batches_tracked is not None]
    if batches:
        torch._foreach_add_(batches, 1)

    rows = []
    for (layer, parts), width in zip(group, channels, strict=True):
        rows.append([width, layer.momentum or 0.0, *(count for count, _ in parts)])
    # The numbers of channels, the momenta and the counts of all layers are in one table, so that a
    # single copy moves them to the GPU. A copy from pinned memory runs while the CPU goes on.
    pinned = accelerator.has_streams(device)
    table = torch.tensor(rows, dtype=dtype, device="cpu", pin_memory=pinned)
    table = table.to(device, non_blocking=True).t()
    if batches and layers[0].momentum is None:
        table[1] = 1 / torch.stack(batches).to(dtype)
    # From a column per layer to a column per channel.
    table = table.repeat_interleave(table[0].long(), dim=1, output_size=sum(channels))
    momenta, counts = table[1], table[2:]

    statistics = []
    for micro_batch in zip(*[parts for _, parts in group], strict=True):
        for _, each in micro_batch:
            statistics.append(each.to(device))
    found = torch.cat(statistics, 1).to(dtype)
    means, variances = found.unflatten(1, counts.shape)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    within = (counts - 1) * variances
    between = counts * (means - mean).square()
    var = (between + within).sum(0) / (total - 1)
    old = torch.cat(running).to(dtype).unflatten(0, (2, -1))
    new = old.lerp(torch.stack([mean, var]), momenta)
    new = new.to(running[0].dtype).flatten()
    torch._foreach_copy_(running, new.split(channels * 2))


def _checked(chunks: int | None) -> int | None:
    if chunks is not None and (
        not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1
    ):
        raise ValueError(
            f"chunks must be a positive int, or None if you call commit() yourself, got {chunks!r}"
        )
    return chunks
