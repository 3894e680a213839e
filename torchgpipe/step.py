"""A training step: a mini-batch whose losses go backward as the schedule says, and how they are put together."""

import warnings
from collections.abc import Callable, Sequence
from math import nan
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from torchgpipe.engine.batch import Batch, one_node
from torchgpipe.engine.program import BatchIO
from torchgpipe.task.entrance import leaves
from torchgpipe.task.stage import Stage
from torchgpipe.task.where import note
from torchgpipe.tensors._autograd import leaves_behind, without_hooks
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, together
from torchgpipe.tensors.observe import NOTHING

Criterion = Callable[[Any, Any], Tensor]
Shown = Callable[[Any], Any]


class StepRequest(NamedTuple):
    """What `step` and `evaluate` are given beside the input; `backward` says which of the two."""

    criterion: Criterion
    target: Any
    reduction: str
    weight: Callable[[Any], Any] | None
    scaler: torch.amp.GradScaler | None = None
    backward: bool = True


class Losses(BatchIO):
    """Call the criterion where an output leaves; go backward through it where the output's gradient is needed.

    The criterion gets what `shown` makes of an output, and the micro-batch's target. It draws
    random numbers as one more stage would. When the last output has left, `batch` is told the
    mini-batch's loss, without its graph.

    A criterion may use more than an output: parameters of its own or of the layers, or a tensor
    that it closes over. What these get as gradients is added up here, and handed on with the others
    when the step ends.
    """

    def __init__(
        self,
        batch: Batch,
        inputs: Sequence[TensorOrTensors],
        sizes: Sequence[int],
        request: StepRequest,
        shown: Shown,
    ) -> None:
        super().__init__(inputs)
        self._batch, self._request, self._shown = batch, request, shown
        self._stage = Stage(len(batch.orders.placement), nn.Identity(), batch.devices[-1])
        self._targets = parted(request.target, sizes)
        self._shares = Shares(request.reduction, request.weight, sizes, self._targets)
        self._under_way: dict[int, tuple[Flat, Tensor]] = {}
        self._losses: dict[int, Tensor] = {}
        self._has_graph = False  # whether the loss of any micro-batch has one
        self._sums: dict[Tensor, Tensor] = {}

    def leave(self, i: int, output: Item) -> None:
        """Work out the loss of micro-batch i."""
        with self._batch.draws(i, self._stage, False).around():
            try:
                loss = self._request.criterion(
                    self._shown(together(output.form, output.flat)), self._targets[i]
                )
            except Exception as error:
                note(error, f"the criterion, micro-batch {i}")
                raise
        loss = self._shares.of(scalar(loss), i)
        self._losses[i] = loss.detach()
        if torch.is_grad_enabled():
            self._under_way[i] = output.flat, loss
            self._has_graph |= loss.requires_grad
        if len(self._losses) == len(self._targets):
            if torch.is_grad_enabled() and not self._has_graph:
                raise RuntimeError(
                    "the criterion returned a loss without a graph for every micro-batch, so there "
                    "is nothing to go backward through; compute it from the output, without "
                    "detach(), item() or no_grad()"
                )
            self._batch.tell(self._loss())

    def _loss(self) -> Tensor:
        losses = [loss for _, loss in sorted(self._losses.items())]
        return (
            torch.stack(losses) if self._request.reduction == "none" else cast(Tensor, sum(losses))
        )

    def output_grads(self, i: int) -> Flat:
        """Return the gradients of micro-batch i's outputs; add up those of the criterion's other leaves."""
        outputs, loss = self._under_way.pop(i)
        if not loss.requires_grad:
            return tuple(
                [None if y is None or not y.requires_grad else torch.zeros_like(y) for y in outputs]
            )
        if self._request.scaler is not None:
            loss = self._request.scaler.scale(loss)
        leaves, only_whole = leaves_behind(loss)
        if only_whole:
            loss.backward()
            return tuple([None if y is None else self._shares.masked(y.grad, i) for y in outputs])
        own = {id(y) for y in outputs}
        leaves = [
            x for x in leaves if x.requires_grad
        ]  # a criterion may freeze what it has used, as GANs do
        others = [x for x in leaves if id(x) not in own]
        with (
            without_hooks(others) if others else NOTHING
        ):  # they run once, when the sums are handed on
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        grads = {id(x): self._shares.masked(grad, i) for x, grad in zip(leaves, found, strict=True)}
        for x in others:
            grad, before = grads[id(x)], self._sums.get(x)
            if grad is None:
                continue
            if before is None:
                self._sums[x] = grad
            else:
                # A sparse tensor can be added to a dense one, not the other way round.
                self._sums[x] = grad + before if before.is_sparse else before + grad
        return tuple([grads.get(id(y)) for y in outputs])

    def sums(self) -> tuple[tuple[Tensor, ...], Flat]:
        """Return the leaves that the criterion used beside the outputs, and what was added up for each.

        In place of a stand-in, that is the parameter that it stands for.
        """
        parameters: dict[Tensor, Tensor] = {}
        for guards in self._batch.guards:
            parameters.update({x: p for p, x in guards.parameters.by_parameter.items()})
        return tuple([parameters.get(x, x) for x in self._sums]), tuple(self._sums.values())


def run_step(
    batch: Batch,
    inputs: Sequence[TensorOrTensors],
    sizes: Sequence[int],
    request: StepRequest,
    shown: Shown,
) -> Tensor:
    """Return the loss of a mini-batch: of forwards alone, or as the node of the caller's graph that hands on gradients.

    Where there are guards for a backward, it goes backward before its last forward, if the schedule
    says so.
    """
    if request.backward and not torch.is_grad_enabled():
        raise RuntimeError("step() goes backward, but gradients are off here; call evaluate()")
    io = Losses(batch, inputs, sizes, request, shown) if batch.last else BatchIO(inputs)
    if batch.last:
        warn_of_other_means(request, sizes)
    grad = bool(batch.guards)
    if request.scaler is not None and not batch.last:
        request.scaler.scale(
            torch.zeros((), device=batch.devices[0])
        )  # or it would not know its scale yet
    for guards in batch.guards:
        guards.backward_begins(0)
    batch.forward(batch.orders.all if grad else batch.orders.forwards, io)
    for guards in batch.guards:
        guards.ended()
    if not grad:
        return batch.loss
    given, found = [*inputs], [grads for _, grads in sorted(io.input_grads.items())]
    if isinstance(io, Losses):
        used, sums = io.sums()
        given, found = [*given, used], [*found, sums]
    (loss,) = one_node(
        batch.guards, lambda *_, keep: found, [1], leaves((batch.loss,), (True,)), given
    )
    assert loss is not None
    return loss


def scalar(loss: object) -> Tensor:
    """Return what a criterion has returned; raise `TypeError` if that is no scalar."""
    if not isinstance(loss, Tensor) or loss.dim():
        given = (
            f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        )
        raise TypeError(f"the criterion must return a scalar tensor, but returned {given}")
    return loss


class Shares:
    """Scale each micro-batch's loss to its part of the mini-batch's loss.

    The reduction "mean" weighs by samples, or by what `weight` says that a target counts; others
    add.
    """

    def __init__(
        self,
        reduction: str,
        weight: Callable[[Any], Any] | None,
        sizes: Sequence[int],
        targets: Sequence[Any],
    ) -> None:
        self._counts: Sequence[Any] | None = None
        if reduction in ("sum", "none") and weight is None:
            return
        if reduction != "mean":
            given = repr(reduction) + " with a weight" * (weight is not None)
            raise ValueError(
                f"reduction must be 'mean', or 'sum' or 'none' without a weight, but got {given}"
            )
        self._counts = sizes if weight is None else [weight(target) for target in targets]
        self._total: Any = sum(self._counts)

    def of(self, loss: Tensor, i: int) -> Tensor:
        """Return the share of micro-batch i: zero if it counts nothing, and NaN if none counts anything.

        A zero has no graph, so that nothing goes backward through a mean of nothing, which would
        give NaN.
        """
        if self._counts is None:
            return loss
        if isinstance(self._total, Tensor):
            part = (self._counts[i].double() / self._total).to(loss)
            return torch.where(part == 0, 0.0, loss * part)
        empty = self._total and not self._counts[i]
        share = self._counts[i] / self._total if self._total else nan
        return torch.zeros_like(loss) if empty else loss * share

    def masked(self, grad: Tensor | None, i: int) -> Tensor | None:
        """Return a gradient through micro-batch i's loss: zeros if it counts nothing, which only the device knows."""
        if grad is None or self._counts is None or not isinstance(self._total, Tensor):
            return grad
        empty = ((self._counts[i] == 0) & (self._total != 0)).to(grad.device)
        if grad.is_sparse:
            values = torch.where(empty, 0.0, grad._values())
            return torch.sparse_coo_tensor(grad._indices(), values, grad.shape)
        return torch.where(empty, 0.0, grad)


def warn_of_other_means(request: StepRequest, sizes: Sequence[int]) -> None:
    """Warn if the criterion of a mean does not return the mean over a micro-batch's samples."""
    options, target = options_of(request.criterion), request.target
    if request.reduction != "mean" or len(sizes) < 2:
        return
    if options.get("reduction") == "sum":
        warnings.warn(
            'the criterion has reduction="sum", but micro-batches are put together as means; give '
            'reduction="sum" to step() and evaluate(), too',
            stacklevel=2,
        )
    index = options.get("ignore_index")
    # A tensor on a GPU is not looked at: that would be to wait for it.
    on_cpu = isinstance(target, Tensor) and target.device.type == "cpu"
    if index is None or request.weight is not None or not on_cpu or not (target == index).any():
        return
    shares = {float(part.double().mean()) for part in (target == index).split([*sizes])}
    if len(shares) > 1:
        warnings.warn(
            "micro-batches have different shares of targets that the criterion ignores, but each "
            "counts by its samples; for the mean over what is not ignored, give step() and "
            f"evaluate() weight=lambda target: (target != {index}).sum()",
            stacklevel=2,
        )


def options_of(criterion: Criterion) -> dict[str, Any]:
    """Return the options of a criterion of PyTorch: of a module, a function, or a `partial` of it; of others none."""
    if type(criterion).__module__ == "torch.nn.modules.loss":
        return vars(criterion)
    function = getattr(criterion, "func", criterion)
    if getattr(function, "__module__", None) != "torch.nn.functional":
        return {}
    default = {"ignore_index": -100} if function in (cross_entropy, nll_loss) else {}
    return {**default, **getattr(criterion, "keywords", {})}


def parted(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return each micro-batch's part of a target: of tensors in tuples, lists and dictionaries, as deep as they go.

    Everything else is for all micro-batches.
    """
    if isinstance(target, Tensor):
        if len(sizes) > 1 and (not target.dim() or len(target) != sum(sizes)):
            raise ValueError(
                f"every tensor of the target needs the batch size, {sum(sizes)}, as its dimension "
                f"0, but one has the shape {tuple(target.shape)}"
            )
        return [*target.split([*sizes])] if len(sizes) > 1 else [target]
    if not isinstance(target, dict | list | tuple) or not target:
        return [target] * len(sizes)
    values = target.values() if isinstance(target, dict) else target
    rows = [*zip(*[parted(x, sizes) for x in values], strict=True)]
    if isinstance(target, dict):
        return [dict(zip(target, row, strict=True)) for row in rows]
    return [[*row] if isinstance(target, list) else together(type(target), row) for row in rows]
