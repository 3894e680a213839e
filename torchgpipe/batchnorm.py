"""Batch normalization whose running statistics come from the mini-batch, though it only meets micro-batches.

A micro-batch is normalized by its own mean and variance; that is what makes pipelined training possible.
The running statistics, which evaluation uses, should nevertheless be those that `nn.BatchNorm` would have
kept for the undivided mini-batch: updated once per mini-batch, from its mean and its unbiased variance.

A micro-batch leaves its count, mean and variance behind. They are combined when the mini-batch ends, by the
formula of Chan, Golub and LeVeque ("Algorithms for computing the sample variance", 1983) for many parts at
once: squared distances to a mean add up, sums of squares are never subtracted from each other. So a mean far
from zero costs no digits.
"""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from torchgpipe.checkpoint import is_recomputing

__all__ = ["DeferredBatchNorm"]

Module = TypeVar("Module", bound=nn.Module)
Statistics = tuple[int, Tensor, Tensor]


class DeferredBatchNorm(_BatchNorm):
    """Normalize micro-batches, and update the running statistics once per mini-batch.

    A mini-batch ends by `commit`, which `GPipe` calls after its forward, or by itself after ``chunks``
    micro-batches. Nothing is tracked in evaluation mode or during recomputation. A layer that is called
    several times in one mini-batch commits once, the statistics of all its calls together.

    Args:
        num_features: channels, dimension 1 of the input; the input is ``(N, C)`` or ``(N, C, ...)``.
        eps, momentum, affine, track_running_stats, device, dtype: as for `torch.nn.BatchNorm2d`.
        chunks: number of micro-batches after which the mini-batch is over; None leaves this to `commit`.

    Raises:
        ValueError: ``chunks`` is below 1; in training, a micro-batch with one value per channel.
    """

    chunks: int | None
    _dimensions: type[_BatchNorm] | None
    _tracked: list[Statistics]

    def __init__(
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
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._defer(chunks, None)

    def _defer(self, chunks: int | None, dimensions: type[_BatchNorm] | None) -> None:
        self.chunks = _checked(chunks)
        self._dimensions = dimensions
        # Not buffers: half() would overflow in a variance, and state_dict() must stay nn.BatchNorm's.
        self._tracked = []

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int | None = 1) -> Module:
        """Replace every batch normalization in a module by a deferred one, and return the module.

        Parameters, buffers, hooks and mode are the replaced layer's own, so that an optimizer made before
        goes on and ``state_dict`` keeps its keys. A layer that occurs twice is replaced by one.
        `nn.SyncBatchNorm` is left alone. If the module is a batch normalization itself, its replacement is
        returned.

        Raises:
            ValueError: ``chunks`` is below 1, or a layer is lazy and has not seen an input.
            TypeError: a layer's class has a ``forward`` of its own, which the replacement would lose.
        """
        chunks = _checked(chunks)
        # All replacements come first, so that a layer which cannot be converted leaves the module as it was.
        replacements: dict[nn.Module, nn.Module] = {
            layer: cls._replacement(layer, chunks)
            for layer in module.modules()
            if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        }
        for name, layer in list(module.named_modules(remove_duplicate=False)):
            if name and layer in replacements:
                module.set_submodule(name, replacements[layer])
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
                f"cannot defer {kind.__name__} before its first input: run the module once, then convert it"
            )
        elif kind.forward is not _BatchNorm.forward:
            raise TypeError(
                f"cannot defer {kind.__name__}, whose forward() is its own and would be lost: "
                "use nn.BatchNorm1d, 2d or 3d in its place, or do without deferred batch normalization"
            )
        deferred = cls.__new__(cls)
        # The tensors are shared, the dictionaries that hold them are not: half() on one spares the other.
        for name, value in vars(layer).items():
            deferred.__dict__[name] = copy(value) if isinstance(value, dict | set) else value
        deferred._defer(chunks, dimensions)
        return deferred

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a micro-batch of shape ``(N, C)`` or ``(N, C, ...)``."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        count = input.numel() // max(input.size(1), 1)
        if count == 1:
            raise ValueError(
                "batch normalization needs more than 1 value per channel in every micro-batch, "
                f"got an input of shape {tuple(input.shape)}: use fewer chunks or a larger mini-batch"
            )
        if not self._tracks() or is_recomputing():
            return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        assert self.running_mean is not None and self.running_var is not None
        # With a momentum of 1 the kernel hands out the statistics that it computes anyway.
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        if count:
            self._tracked.append((count, mean, var))
        if len(self._tracked) == self.chunks:
            self.commit()
        return output

    def _tracks(self) -> bool:
        return self.track_running_stats and self.running_mean is not None and self.running_var is not None

    @torch.no_grad()
    def commit(self) -> None:
        """End the mini-batch: update the running statistics from what was tracked, if anything was."""
        tracked, self._tracked = self._tracked, []
        if not tracked or self.running_mean is None or self.running_var is None:
            return
        mean, var = _combine(tracked, like=self.running_mean)
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        if momentum is None:
            momentum = 0.0
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_((1 - momentum) * running.to(new.dtype) + momentum * new)

    def discard(self) -> None:
        """Forget what was tracked since the last commit, because the mini-batch failed."""
        self._tracked = []

    def extra_repr(self) -> str:
        """Describe the layer as `nn.BatchNorm` does, with its chunks."""
        plain: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}, chunks={self.chunks}"

    def _check_input_dim(self, input: Tensor) -> None:
        if self._dimensions is not None:
            self._dimensions._check_input_dim(self, input)
        elif input.dim() < 2:
            raise ValueError(f"expected an input of shape (N, C) or (N, C, ...), got {tuple(input.shape)}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # torchgpipe 0.0.7 saved the sums of an unfinished mini-batch.
        for name in ("sum", "sum_squares"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _combine(tracked: list[Statistics], *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of all parts together, on ``like``'s device, in float32 or better.

    N    = sum of n
    mean = sum of n / N * mean_i
    var  = (sum of (n - 1) * var_i + sum of n * (mean_i - mean)**2) / (N - 1)
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    counts = [count for count, _, _ in tracked]
    total = sum(counts)
    means = torch.stack([mean.to(like.device, dtype) for _, mean, _ in tracked])
    variances = torch.stack([var.to(like.device, dtype) for _, _, var in tracked])

    def weights(parts: list[float]) -> Tensor:
        return torch.tensor(parts, dtype=dtype).to(like.device, non_blocking=True).unsqueeze(1)

    mean = (weights([n / total for n in counts]) * means).sum(0)
    within = (weights([(n - 1) / (total - 1) for n in counts]) * variances).sum(0)
    between = (weights([n / (total - 1) for n in counts]) * (means - mean).square()).sum(0)
    return mean, within + between


def _checked(chunks: int | None) -> int | None:
    if chunks is not None and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1):
        raise ValueError(f"chunks must be a positive int, or None to commit by commit() only, got {chunks!r}")
    return chunks
