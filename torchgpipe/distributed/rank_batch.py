"""One rank's part of a mini-batch: run its tasks, and exchange messages before and after them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchgpipe.distributed.alike import check_alike
from torchgpipe.distributed.connections import Connections
from torchgpipe.distributed.elsewhere import OtherRanksParameters
from torchgpipe.distributed.links import Messages, RandomState
from torchgpipe.distributed.no_output import NoOutput
from torchgpipe.distributed.tied import TiedParameters
from torchgpipe.engine.batch import Batch, Enter, one_node, run_forward
from torchgpipe.engine.program import BatchIO
from torchgpipe.layers.batches import joined
from torchgpipe.partitioned import Partitioned
from torchgpipe.schedules.check import Lists
from torchgpipe.step.request import StepRequest, scalar
from torchgpipe.step.targets import whole
from torchgpipe.task.entrance import as_leaves
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors
from torchgpipe.trace.parts import tensors_in


class LossRequest(NamedTuple):
    """The arguments of `loss()`, without the input."""

    criterion: Callable[[Any, Any], Tensor]
    target: Any

    @property
    def call(self) -> str:
        """The method that was called."""
        return "loss"


Request = StepRequest | LossRequest | None
"""The arguments of `step()`, `evaluate()` or `loss()`; `None` for a call of the pipeline itself."""


class RankBatch(Batch):
    """Run the partitions of one rank in a mini-batch, together with all other ranks.

    In each mini-batch, two messages go from one rank to all other ranks: the head, which begins the
    mini-batch, and the loss. `Connections.tell` and `Connections.hear` send and receive them. In
    this picture, time goes downward:

        rank of the first stage      ranks in between           rank of the last stage
        -----------------------      ----------------           ----------------------
        _tell_head  --- head --->    _hear_head
                    --- head ------------------------------>    _hear_head
        run                          run                        run
                                     _hear_loss  <--- loss ---  tell
        _hear_loss  <-------------------------------- loss ---

    The head has the number from which random seeds are made (the base), checksums of the data, the
    sizes of the micro-batches, and the settings. The rank of the first stage draws the base, and
    sends the head just before its run. Other ranks wait for the head in `__init__`, because they
    need it to make their program (list of tasks).

    The loss message has the loss, whether it requires a gradient, and the state of the default
    generator if this state has changed. It is sent as soon as the loss is known: during the run in
    `step()`, and otherwise after the run. Other ranks receive it after their run.

    During the run, `Messages` sends activations and gradients from stage to stage.

    Args:
        connections: The connections of this rank. The caller has entered `Connections.call`.
        settings: The settings of the pipeline that have to be the same on all ranks.
        inputs: The micro-batches on the rank of the first stage; empty on other ranks.
        checksums: Checksums of this rank's input and target.
        owner: The pipeline.

    Attributes:
        first_checksums: The checksums of the input and the target on the rank of the first stage.
        inputs: The micro-batches on the rank of the first stage.
        sizes: The size of each micro-batch, the same on all ranks.
        program: The program of this rank, which runs the rank's list of actions.
    """

    def __init__(
        self,
        connections: Connections,
        settings: dict[str, Any],
        inputs: list[TensorOrTensors],
        checksums: list[int],
        owner: Partitioned,
    ) -> None:
        # Keep the pipeline alive until the backward: when the pipeline is garbage-collected, its
        # connections are closed.
        self._owner = owner
        self._connections = connections
        self._tied = cast(TiedParameters, owner._tied)
        self._serial = connections.serial
        self._settings = settings | {"grad mode": torch.is_grad_enabled()}
        self._first = owner._programs_engine.arrangement.placement[0]
        self.inputs = inputs
        if connections.own == self._first:
            base, self.first_checksums, self.sizes = None, checksums, owner._sizes(inputs)
        else:
            base, self.first_checksums, self.sizes = self._hear_head()
        m = len(self.sizes)
        super().__init__(owner._programs_engine, m, owner.checkpoint, owner.observer, base=base)
        self.elsewhere = cast(Mapping[Tensor, str], owner._elsewhere)
        if not owner._searched:
            for guards in self.guards:
                guards.add(OtherRanksParameters(guards.index, self.elsewhere))
        (self.program,) = self.programs.values()
        connections.liveness.activity.program = self.program

    def forward(self, lists: Lists, io: BatchIO) -> None:
        """Send the head (the first message), run this rank's list of actions, and receive the loss.

        Only the rank of the first stage sends the head. The head contains the number that random
        seeds are made from, so the caller must have entered the context `seeding`. The rank of the
        last stage does not receive the loss, but sends it: in a `step` during the run, and in other
        calls after this method (`_result`).
        """
        if self._connections.own == self._first:
            self._tell_head()
        super().forward(lists, io)
        if not self.last:
            self._hear_loss()

    def _tell_head(self) -> None:
        base = self._seeds.base or 0
        numbers = [base, *self.first_checksums, *self.sizes]
        head = torch.tensor(numbers, device="cpu")
        settings = tuple(self._settings.items())
        self._connections.tell("head", (head,), settings)

    def _hear_head(self) -> tuple[int, list[int], list[int]]:
        """Receive the head, which is the first message of a mini-batch.

        Raise an error if the head's settings differ from those of this rank. Return the number from
        which random seeds are made, the checksums of the data, and the sizes of the micro-batches.
        """
        own, first = self._connections.own, self._first
        theirs, (head,) = self._connections.hear("head", first)
        check_alike("the pipeline", self._settings, dict(theirs), own, first)
        base, input_sum, target_sum, *sizes = head.tolist()
        return base, [input_sum, target_sum], sizes

    def tell(
        self,
        loss: Tensor,
        requires_grad: bool = False,
        through_pipeline: bool = False,
        before: Tensor | None = None,
    ) -> None:
        """Send the loss to all other ranks, and the state of the default generator if needed.

        Other ranks need the generator's state if only one task runs at a time in the pipeline, or
        if the criterion has changed the state.

        Args:
            loss: The mini-batch's loss.
            requires_grad: Whether the loss requires a gradient.
            through_pipeline: Whether the backward of the loss goes through this pipeline.
            before: The generator's state before the criterion ran, or `None` if the criterion
                cannot have changed it.
        """
        super().tell(loss.detach())
        after = torch.get_rng_state()
        changed = before is not None and not torch.equal(before, after)
        state = (after,) if changed or not self._overlaps else ()
        drew = self._seeds.drew and not state
        about = requires_grad, through_pipeline, drew
        self._connections.tell("loss", (self.loss, *state), about, "loss")

    def _hear_loss(self) -> None:
        last = self.orders.placement[-1]
        about, (loss, *state) = self._connections.hear("loss", last, "loss")
        self._loss_requires_grad, self._through_pipeline, self._seeds.drew = about
        if state:
            torch.set_rng_state(state[0].cpu())
        self.loss = loss.to(self.devices[0])

    def run(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        """Run this rank's list of actions, and wait until other ranks have received its messages.

        Args:
            lists: The actions of each rank.
            io: The inputs and outputs of the pipeline, and the gradients of both.
            modes: A function that returns a context manager with the caller's modes, such as
                autocast.
            keep: Whether to keep the graphs, so that another backward is possible later.
        """
        random = RandomState(self._seeds, in_order=not self._overlaps)
        connections = self._connections
        crossings = self._owner._layout()
        links = Messages(connections, crossings, self.orders.placement, lists, random)
        actions = lists[connections.own]
        with self._stand_ins, modes():
            self.program.run(actions, links, io, keep=keep)
        has_backwards = lists is not self.orders.forwards
        if has_backwards:
            vars(self._owner)["_searched"] = True  # by `OtherRanksParameters`
            if self._tied.peers:
                self.program.doing = "the sum of tied parameters' gradients"
                self._tied.add_up(connections, self.guards, io)
        # Otherwise, a message that is not sent yet is lost if the process ends now.
        connections.deliver()

    def run_call(self, request: LossRequest | None) -> Any:
        """Run all forwards of this rank, and return the result for the caller of the pipeline.

        If `request` (the arguments of `loss()`) is given, the result is the loss on all ranks.
        Otherwise it is the output on the rank of the last stage, and zero (`NoOutput`) on other
        ranks. If the result requires grad, its backward runs this rank's backwards.
        """
        outputs = run_forward(self, self.inputs)
        if self.last:
            return self._result(outputs, request)
        losses = as_leaves((self.loss,), (self._loss_requires_grad,))
        if self._through_pipeline:
            losses = one_node(self.guards, self.backward, [1], losses, self.inputs)
        (result,) = losses
        assert result is not None
        return result.as_subclass(NoOutput) if request is None else result

    def _result(self, outputs: list[TensorOrTensors], request: LossRequest | None) -> Any:
        """Send the loss to other ranks; return the loss, or the output if `request` is `None`.

        Only the rank of the last stage calls this method.
        """
        before = torch.get_rng_state()
        output = joined(outputs)
        owner = self._owner
        result = owner._structured(output) if request is None else owner._for_criterion(output)
        ends = tuple([y for y in tensors_in(output) if y.requires_grad])
        if request is None:
            device = self.devices[-1]
            loss = torch.zeros((), device=device, requires_grad=bool(ends))
        else:
            self.program.doing = self.program.computing = "the criterion"
            result = loss = scalar(request.criterion(result, whole(request.target)), "loss")
            self.program.computing = None
            self._tied.refuse_in(loss, ends)
            if loss.requires_grad and ends:
                result = _with_ends(loss, ends)
        requires_grad = loss.requires_grad
        through_pipeline = requires_grad and bool(ends)
        self.tell(loss, requires_grad, through_pipeline, before)
        return result

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run the remaining actions of this rank: recomputations and backwards.

        Returns:
            The gradients of the micro-batches' inputs, on the rank of the first stage.
        """
        with self._connections.call(self._serial, "backward", self.program):
            return super().backward(output_grads, keep=keep)


def _with_ends(loss: Tensor, ends: tuple[Tensor, ...]) -> Tensor | None:
    """Return the loss with an extra graph edge to each output of the pipeline (`ends`).

    Other ranks wait for gradients from this rank. Without these edges, the backward of a loss that
    does not use the outputs would not reach the pipeline, and other ranks would wait for ever.
    """

    def onward(grads: list[Flat], keep: bool) -> list[Flat]:
        return [(*grads[0], *[None] * len(ends))]

    outputs = as_leaves((loss,), (True,))
    inputs = [(loss, *ends)]
    (result,) = one_node([], onward, [1], outputs, inputs)
    return result
