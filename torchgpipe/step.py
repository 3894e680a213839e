"""A training step: a mini-batch whose losses go backward as the schedule says, and how they are put together."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from torchgpipe.engine.batch import Batch, one_node
from torchgpipe.engine.program import Ends
from torchgpipe.task.stage import Stage
from torchgpipe.task.task_graph import leaves
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, together

Criterion = Callable[[Any, Any], Tensor]
Shown = Callable[[Any], Any]


class Goal(NamedTuple):
    """What `step` and `evaluate` are given beside the input."""

    criterion: Criterion
    target: Any
    reduction: str
    weight: Callable[[Any], Any] | None
    scaler: torch.amp.GradScaler | None = None
    backward: bool = True


class Losses(Ends):
    """Call the criterion where an output leaves; go backward through it where the output's gradient is needed.

    The criterion gets what `shown` makes of an output, and the micro-batch's target. It draws random numbers as one
    more stage would. Its parameters have stand-ins, so that a step adds to their gradients once. When the last output
    has left, `batch` is told the mini-batch's loss, without its graph.
    """

    def __init__(
        self, batch: Batch, inputs: Sequence[TensorOrTensors], sizes: Sequence[int], goal: Goal, shown: Shown
    ) -> None:
        super().__init__(inputs)
        self._batch, self._goal, self._shown = batch, goal, shown
        owner = getattr(goal.criterion, "__self__", goal.criterion)
        layers = owner if isinstance(owner, nn.Module) else nn.Identity()
        self._stage = Stage(len(batch.orders.placement), layers, batch.devices[-1])
        self._stage.look()
        self._targets = parted(goal.target, sizes)
        self._share = sharing(goal.reduction, goal.weight, sizes, self._targets)
        self._under_way: dict[int, tuple[Flat, Tensor]] = {}
        self._losses: dict[int, Tensor] = {}
        self._in_place: Callable[[], AbstractContextManager[object]] = nullcontext
        if batch.snapshots:
            batch.snapshots.append(snapshot := self._stage.snapshot(recomputed=False))
            self._in_place = snapshot.stand_ins.in_place

    def leave(self, i: int, output: Item) -> None:
        """Work out the loss of micro-batch i."""
        with self._stage.lock, self._batch.draws(i, self._stage, False).first(), self._in_place():
            loss = self._goal.criterion(self._shown(together(output.form, output.flat)), self._targets[i])
        loss = self._share(scalar(loss), i)
        self._losses[i] = loss.detach()
        if torch.is_grad_enabled():
            self._under_way[i] = output.flat, loss
        if len(self._losses) == len(self._targets):
            if self._goal.reduction == "none":
                return self._batch.tell(torch.stack([x for _, x in sorted(self._losses.items())]))
            self._batch.tell(cast(Tensor, sum(self._losses.values())))

    def output_grads(self, i: int) -> Flat:
        """Return the gradients of micro-batch i's outputs."""
        outputs, loss = self._under_way.pop(i)
        with self._stage.lock, self._in_place():
            (loss if self._goal.scaler is None else self._goal.scaler.scale(loss)).backward()
        return tuple([None if y is None else y.grad for y in outputs])


def carried_out(
    batch: Batch, inputs: Sequence[TensorOrTensors], sizes: Sequence[int], goal: Goal, shown: Shown
) -> Tensor:
    """Return the loss of a mini-batch: of forwards alone, or as the node of the caller's graph that hands on gradients.

    Where its batch has snapshots, it goes backward before its last forward, if the schedule says so.
    """
    if goal.backward and not torch.is_grad_enabled():
        raise RuntimeError("step() goes backward, but gradients are off here; call evaluate()")
    ends = Losses(batch, inputs, sizes, goal, shown) if batch.last else Ends(inputs)
    if batch.last:
        warn_of_other_means(goal, sizes)
    grad, snapshots = bool(batch.snapshots), batch.snapshots
    if goal.scaler is not None and not batch.last:
        goal.scaler.scale(torch.zeros((), device=batch.devices[0]))  # or it would not know its scale yet
    for snapshot in snapshots:
        snapshot.begin(0)
    batch.forward(batch.orders.all if grad else batch.orders.forwards, ends)
    for snapshot in snapshots:
        snapshot.check_sure()
    if not grad:
        return batch.loss
    found = [grads for _, grads in sorted(ends.input_grads.items())]
    (loss,) = one_node(snapshots, lambda *_, keep: found, [1], leaves((batch.loss,), (True,)), inputs)
    assert loss is not None
    return loss


def scalar(loss: object) -> Tensor:
    """Return what a criterion has returned; raise `TypeError` if that is no scalar."""
    if not isinstance(loss, Tensor) or loss.dim():
        given = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the criterion must return a scalar tensor, but returned {given}")
    return loss


def sharing(
    reduction: str, weight: Callable[[Any], Any] | None, sizes: Sequence[int], targets: Sequence[Any]
) -> Callable[[Tensor, int], Tensor]:
    """Return what makes of micro-batch i's loss its share: "mean" weighs by samples, or by `weight`; others do not."""
    if reduction in ("sum", "none") and weight is None:
        return lambda loss, i: loss
    if reduction != "mean":
        given = repr(reduction) + " with a weight" * (weight is not None)
        raise ValueError(f"reduction must be 'mean', or 'sum' or 'none' without a weight, but got {given}")
    counts: Sequence[Any] = sizes if weight is None else [weight(target) for target in targets]
    total: Any = sum(counts)
    # Where nothing counts, a criterion's mean may be NaN.
    if not isinstance(total, Tensor):
        return lambda loss, i: (loss if counts[i] else loss.nan_to_num()) * (counts[i] / (total or 1))
    parts = [count.double() / total for count in counts]
    return lambda loss, i: torch.where((parts[i] == 0).to(loss.device), 0.0, loss * parts[i].to(loss.dtype))


def warn_of_other_means(goal: Goal, sizes: Sequence[int]) -> None:
    """Warn if the criterion of a mean does not return the mean over a micro-batch's samples."""
    options, target = options_of(goal.criterion), goal.target
    if goal.reduction != "mean" or len(sizes) < 2:
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
    if index is None or goal.weight is not None or not on_cpu or not (target == index).any():
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
    """Return what can be seen of a criterion's options: of a module, a `partial`, or PyTorch's functions."""
    given: dict[str, Any] = getattr(criterion, "keywords", getattr(criterion, "__dict__", {}))
    function = getattr(criterion, "func", criterion)
    return {"ignore_index": -100, **given} if function in (cross_entropy, nll_loss) else given


def parted(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return each micro-batch's part of a target: of tensors in tuples, lists and dictionaries, as deep as they go.

    Everything else is for all micro-batches.
    """
    if isinstance(target, Tensor):
        if len(sizes) > 1 and (not target.dim() or len(target) != sum(sizes)):
            raise ValueError(
                f"every tensor of the target needs the batch size, {sum(sizes)}, as its dimension 0, but one has the "
                f"shape {tuple(target.shape)}"
            )
        return [*target.split([*sizes])] if len(sizes) > 1 else [target]
    if not isinstance(target, dict | list | tuple) or not target:
        return [target] * len(sizes)
    values = target.values() if isinstance(target, dict) else target
    rows = [*zip(*[parted(x, sizes) for x in values], strict=True)]
    if isinstance(target, dict):
        return [dict(zip(target, row, strict=True)) for row in rows]
    return [[*row] if isinstance(target, list) else together(type(target), row) for row in rows]
