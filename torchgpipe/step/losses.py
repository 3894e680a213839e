"""Compute the losses of micro-batches, and run their backwards in the schedule's order."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchgpipe.engine.batch import Batch, one_node
from torchgpipe.engine.program import BatchIO
from torchgpipe.step.counted import Counted, counted
from torchgpipe.step.means import warn_of_other_means
from torchgpipe.step.request import (
    StepRequest,
    check_criterion,
    check_without_target,
    scalar,
    start_scaler,
)
from torchgpipe.step.shares import Shares
from torchgpipe.step.targets import detached, parted, sample_counts, with_tensors
from torchgpipe.task.entrance import as_leaves
from torchgpipe.task.stage import Stage
from torchgpipe.task.where import note
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.leaves import leaves_behind, sequence_number, without_hooks
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, carrying, together
from torchgpipe.tensors.observe import NOTHING
from torchgpipe.trace.parts import tensors_in

IN_STEP = 0
"""The number of the backward of a step, which is no backward of autograd."""


class Losses(BatchIO):
    """Call the criterion on each micro-batch's output, and run the backward of each loss.

    The criterion draws random numbers as if it were one more stage after the last. After the last
    micro-batch, `batch.tell` is called with the loss of the mini-batch.

    A criterion can also use other tensors that require grad: its own parameters, the layers'
    parameters, or a tensor that it closes over. The gradients of these tensors are summed over the
    micro-batches, and `sums` returns the sums when the step ends.

    Args:
        batch: The mini-batch.
        inputs: The micro-batches, if the first stage is in this process.
        sizes: The number of samples of each micro-batch.
        request: The arguments of `step` or `evaluate`, such as the criterion and the target.
        for_criterion: A function that converts an output to the first argument of the criterion.

    Attributes:
        targets: The target of each micro-batch.
        sizes: The number of samples of each micro-batch, or `UNCOUNTED`.
        counted: For each micro-batch, the targets over which the criterion has averaged (see
            `torchgpipe.step.counted`), or `None`. It is filled only in the steps 1, 2, 4, 8, ... of
            a pipeline.
    """

    def __init__(
        self,
        batch: Batch,
        inputs: Sequence[TensorOrTensors],
        sizes: Sequence[int],
        request: StepRequest,
        for_criterion: Callable[[Any], Any],
    ) -> None:
        super().__init__(inputs)
        if request.target is None:
            check_without_target(request)
        self._batch, self._request, self._for_criterion = batch, request, for_criterion
        self._stage = Stage(len(batch.orders.placement), nn.Identity(), batch.devices[-1])
        # The keys are the leaves that replace targets with a graph, and the values these targets.
        self._cut: dict[Tensor, Tensor] = {}
        self.targets = parted(self._without_graphs(request.target), sizes)
        self.sizes = sample_counts(request.target, sizes)
        self._shares = Shares(request.reduction, request.weight, self.sizes, self.targets)
        self.counted: list[Counted | None] = [None] * len(self.targets)
        # Whether to look at what the criterion counts. A single micro-batch needs no weight.
        several = len(self.targets) > 1
        self._looks = request.looks and request.weight is None and several
        self._under_way: dict[int, tuple[Flat, Tensor, int]] = {}
        self._losses: dict[int, Tensor] = {}
        self._logs: dict[int, Any] = {}
        self._has_graph = False  # whether the loss of any micro-batch has one
        self._sums: dict[Tensor, Tensor] = {}

    def _without_graphs(self, target: Any) -> Any:
        """Return the target, with detached leaves in place of tensors that have an autograd graph.

        So the backward of each loss ends at these leaves, and their gradients are added up.
        """

        def cut(x: Tensor) -> Tensor:
            if x.grad_fn is None or not torch.is_grad_enabled():
                return x
            leaf = x.detach().requires_grad_()
            self._cut[leaf] = x
            return leaf

        return with_tensors(cut, target)

    def forward_ended(self, i: int, output: Item) -> None:
        """Compute the loss of micro-batch i from the last stage's output.

        After the last micro-batch, call `batch.tell` with the loss of the mini-batch.

        Raises:
            RuntimeError: If gradients are enabled, and no loss of the mini-batch has a graph.
        """
        since = sequence_number()
        result = self._loss_of(i, output)
        if isinstance(result, tuple) and len(result) == 2:
            result, log = result
            # A graph would keep the outputs alive, although the backward has freed what it saved.
            self._logs[i] = detached(log)
        loss = scalar(result)
        if self._looks:
            self.counted[i] = counted(loss)
        loss = self._shares.of(loss, i)
        self._losses[i] = loss.detach()
        if torch.is_grad_enabled():
            self._under_way[i] = output.flat, loss, since
            self._has_graph |= loss.requires_grad
        if len(self._losses) < len(self.targets):
            return
        if torch.is_grad_enabled() and not self._has_graph:
            raise RuntimeError(
                "the criterion returned a loss without a graph for every micro-batch, so no "
                "backward can run: it does not compute the loss from the output, or uses detach() "
                "or no_grad(), or no parameter requires grad; to train nothing, call evaluate()"
            )
        self._request.logs[:] = [self._logs[i] for i in sorted(self._logs)]
        losses = [loss for _, loss in sorted(self._losses.items())]
        apart = self._request.reduction == "none"
        self._batch.tell(torch.stack(losses) if apart else cast(Tensor, sum(losses)))

    def _loss_of(self, i: int, output: Item) -> object:
        """Call the criterion on the output of micro-batch i, and return its result."""
        # The current device matters for criteria that create tensors on device "cuda".
        on_device = accelerator.current(self._stage.device)
        with on_device, self._batch.draws(i, self._stage, False).around():
            try:
                given = self._for_criterion(together(output.form, handed(output.flat)))
                return self._request.criterion(given, self.targets[i])
            except Exception as error:
                note(error, f"the criterion, micro-batch {i}{self._hint(i, error)}")
                raise

    def _hint(self, i: int, error: Exception) -> str:
        """Return text about the arguments of the criterion, to add to an error of the criterion.

        The text is "" if nothing is known to be wrong with the arguments for micro-batch i.
        """
        if isinstance(error, TypeError) and "positional argument" in str(error):
            return "; the criterion is called with two arguments, (output, target)"
        if self._request.target is None:
            return f"; its target is None: give {self._request.call}(criterion, input, target)"
        here = self._batch.devices[-1]
        for x in tensors_in(self.targets[i]):
            if x.device != here:
                return (
                    f"; the output is on {here}, but a tensor of the target on {x.device}: give "
                    f"target.to({str(here)!r})"
                )
        return ""

    def begin_backward(self, i: int) -> Flat:
        """Run the backward of micro-batch i's loss, down to the outputs of the last stage.

        Return the gradients of these outputs. If the criterion has used other leaf tensors, such as
        parameters, their gradients are added to the sums that `sums` returns.

        If the criterion uses a tensor that has a graph already, the losses of all micro-batches
        share this graph. So only the last backward frees it.
        """
        outputs, loss, since = self._under_way.pop(i)
        if not loss.requires_grad:
            return _zeros(outputs)
        if self._request.scaler is not None:
            loss = self._request.scaler.scale(loss)
        # A tensor that the criterion closes over can have an older graph, behind all losses.
        ends = len(self._losses) == len(self.targets) and not self._under_way
        leaves, only_whole, older = leaves_behind(loss, since)
        keep = not ends and older
        own = {id(y) for y in outputs}
        if only_whole:
            loss.backward(retain_graph=keep)
            return tuple([None if y is None else self._shares.masked(y.grad, i) for y in outputs])
        leaves = [x for x in leaves if x.requires_grad]  # a criterion may freeze what it has used
        others = [x for x in leaves if id(x) not in own]
        # Hooks of the other leaves run only once, when the caller's backward gets the sums.
        unhooked: AbstractContextManager[Any] = without_hooks(others) if others else NOTHING
        with unhooked:
            found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=keep)
        masked = [self._shares.masked(grad, i) for grad in found]
        grads = dict(zip(map(id, leaves), masked, strict=True))
        for x in others:
            self._add(x, grads[id(x)])
        return tuple([grads.get(id(y)) for y in outputs])

    def _add(self, leaf: Tensor, grad: Tensor | None) -> None:
        if grad is None:
            return
        before = self._sums.get(leaf)
        if before is None:
            if leaf in self._batch.elsewhere:
                raise RuntimeError(
                    f"the criterion uses {self._batch.elsewhere[leaf]}, a parameter of another "
                    "rank's layers, which would not get a gradient from it; for a penalty on "
                    "parameters, add the penalty's gradient on each rank, for its own parameters"
                )
            self._sums[leaf] = grad
        elif before.is_sparse:
            # A sparse tensor can be added to a dense one, not the other way round.
            self._sums[leaf] = grad + before
        else:
            self._sums[leaf] = before + grad

    def sums(self) -> tuple[tuple[Tensor, ...], Flat]:
        """Return the tensors that the criterion has used, and the sum of each tensor's gradients.

        These tensors are parameters and other leaf tensors, but not the pipeline's outputs. While
        the criterion ran, detached leaves replaced some of them. In the result, the original
        tensors stand in place of these leaves.
        """
        meant = self._originals()
        originals = tuple([meant.get(x, x) for x in self._sums])
        # A stand-in can be on another device than its parameter, which several partitions share.
        sums = zip(self._sums.values(), originals, strict=True)
        return originals, tuple([grad.to(x.device) for grad, x in sums])

    def take_sum(self, p: Tensor) -> Tensor | None:
        """Return the sum of a parameter's gradients from the criterion, and remove the sum.

        Return `None` if the criterion has not used the parameter.
        """
        meant = self._originals()
        total: Tensor | None = None
        for leaf in [*self._sums]:
            if meant.get(leaf, leaf) is p:
                grad = self._sums.pop(leaf)
                total = grad if total is None else total + grad
        return total

    def _originals(self) -> dict[Tensor, Tensor]:
        """Return a dictionary that maps detached leaves to the tensors that they replace.

        While the criterion runs, detached leaves replace targets that have a graph, and parameters
        of layers.
        """
        meant = {**self._cut}
        for guards in self._batch.guards:
            by_parameter = guards.parameters.by_parameter
            meant.update({stand_in: p for p, stand_in in by_parameter.items()})
        return meant


def handed(outputs: Flat) -> Flat:
    """Return a micro-batch's outputs as tensors that a criterion may change in place.

    Autograd forbids this for leaf tensors that require grad, so the results are not leaves.
    """
    taking = [y for y in outputs if y is not None and y.requires_grad]
    if not taking:
        return outputs
    remaining = iter(_Handed.apply(*taking))
    found: list[Tensor | None] = []
    for y in outputs:
        if y is not None and y.requires_grad:
            y = carrying(next(remaining), y)
        found.append(y)
    return tuple(found)


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([y.detach() for y in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def _zeros(outputs: Iterable[Tensor | None]) -> Flat:
    """Return zeros as the gradients of outputs, for a loss that does not depend on any output."""
    return tuple(
        [None if y is None or not y.requires_grad else torch.zeros_like(y) for y in outputs]
    )


def run_step(
    batch: Batch,
    inputs: Sequence[TensorOrTensors],
    sizes: Sequence[int],
    request: StepRequest,
    for_criterion: Callable[[Any], Any],
) -> Tensor:
    """Run all tasks of a mini-batch in the schedule's order, and return the mini-batch's loss.

    The tasks are the forwards and, if gradients are enabled, the recomputations and backwards. The
    returned loss has an autograd node. The backward of this node runs no layers: it only hands the
    gradients that were computed here to the parameters and the inputs.

    Args:
        batch: The mini-batch.
        inputs: The micro-batches, if the first stage is in this process.
        sizes: The number of samples of each micro-batch.
        request: The arguments of `step` or `evaluate`.
        for_criterion: A function that converts an output to the first argument of the criterion.

    Raises:
        RuntimeError: If the caller wants a backward, but gradients are disabled.
        TypeError: If the criterion is not a function, or the scaler is not a gradient scaler.
    """
    if batch.last:
        check_criterion(request.criterion, request.call)
    if request.scaler is not None:
        start_scaler(request.scaler, batch.devices[-1])
    if request.backward and not torch.is_grad_enabled():
        raise RuntimeError(
            "step() runs a backward, but gradients are disabled here, as by torch.no_grad(); call "
            "evaluate() instead"
        )
    io = BatchIO(inputs)
    if batch.last:
        io = Losses(batch, inputs, sizes, request, for_criterion)
    # A step mixes forwards and backwards, so its backward begins before its first forward.
    for guards in batch.guards:
        guards.backward_begins(IN_STEP)
    lists = batch.orders.all if batch.guards else batch.orders.forwards
    with batch.seeding:
        batch.forward(lists, io)
    for guards in batch.guards:
        guards.ended()
    if isinstance(io, Losses):
        warn_of_other_means(request, io.targets, io.sizes, io.counted)
    if not batch.guards:
        return batch.loss
    node_inputs = [*inputs]
    input_grads = [grads for _, grads in sorted(io.input_grads.items())]
    if isinstance(io, Losses):
        used, sums = io.sums()
        node_inputs.append(used)
        input_grads.append(sums)
    leaf = as_leaves((batch.loss,), (True,))
    (loss,) = one_node(batch.guards, lambda *_, keep: input_grads, [1], leaf, node_inputs)
    assert loss is not None
    return loss
