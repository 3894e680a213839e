"""One rank's part of a mini-batch: its program, and what ranks agree on before and after that."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.distributed.connections import Connections
from torchgpipe.distributed.links import Messages
from torchgpipe.engine.batch import Batch, Enter, one_node, run_forward
from torchgpipe.engine.program import BatchIO
from torchgpipe.partitioned import Partitioned
from torchgpipe.schedules.check import Lists
from torchgpipe.step.losses import scalar
from torchgpipe.task.entrance import leaves
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, gather, tensors_of


class LossRequest(NamedTuple):
    """What `loss()` is given beside the input; the criterion is called with the whole output."""

    criterion: Callable[[Any, Any], Tensor]
    target: Any


class RankBatch(Batch):
    """Run the partitions of one rank in a mini-batch, and tell and hear what concerns all ranks.

    The first stage's rank has the `inputs`, and decides what seeds begin with. The last stage's has the outputs. The
    `sizes` of micro-batches are the same on all. `settings` are what every rank has to call the pipeline with alike,
    and `owner` is that pipeline. `given` are checksums of this rank's data.

    Attributes:
        given: those of the data that the first stage's rank was given.
    """

    def __init__(
        self,
        connections: Connections,
        settings: dict[str, Any],
        inputs: list[TensorOrTensors],
        given: list[int],
        owner: Partitioned,
    ) -> None:
        self._owner = owner  # a pipeline that is collected closes its connections
        self._connections, self._serial = connections, connections.serial
        self._settings = settings | {"grad mode": torch.is_grad_enabled()}
        self._first, base, sizes = owner._steps.arrangement.placement[0], None, owner._sizes(inputs)
        if connections.own != self._first:
            (head,), theirs = connections.hear("head", self._first)
            connections.check_alike("the pipeline", self._settings, dict(theirs), self._first)
            base, input_sum, target_sum, *sizes = head.tolist()
            given = [input_sum, target_sum]
        self.given = given
        self.inputs, self.sizes = inputs, sizes
        super().__init__(owner._steps, len(sizes), owner.checkpoint, owner.observer, base=base)
        self._seeded = self._agreed(self._seeded)
        (self.program,) = self.programs.values()
        connections.liveness.activity.program = self.program

    def finished(self, request: LossRequest | None) -> Any:
        """Run every task's forward; return what the caller gets.

        On the last rank that is the output, or its loss. The others get this scalar, or a zero,
        without its graph; if it takes a gradient, its backward is this rank's.
        """
        outputs = run_forward(self, self.inputs)
        if self.last:
            before = torch.get_rng_state()
            output = gather(outputs)
            result = self._owner._shown(output) if request is None else self._owner._seen(output)
            ends = tuple([y for y in tensors_of(output) if y.requires_grad])
            loss = torch.zeros((), device=self.devices[-1], requires_grad=bool(ends))
            if request is not None:
                self.program.doing = self.program.computing = "the criterion"
                result = loss = scalar(request.criterion(result, request.target))
                self.program.computing = None
                if loss.requires_grad and ends:
                    # Its backward goes on to the output also where the criterion has left that out: ranks wait.
                    def onward(grads: list[Flat], keep: bool) -> list[Flat]:
                        return [(*grads[0], *[None] * len(ends))]

                    (result,) = one_node([], onward, [1], leaves((loss,), (True,)), [(loss, *ends)])
            self.tell(loss, loss.requires_grad, loss.requires_grad and bool(ends), before)
            return result
        needs, ours = self._takes
        leaf = leaves((self.loss,), (needs,))
        return (one_node(self.guards, self.backward, [1], leaf, self.inputs) if ours else leaf)[0]

    @contextmanager
    def _agreed(self, seeded: AbstractContextManager[object]) -> Iterator[None]:
        with seeded:
            if self._connections.own == self._first:
                head = torch.tensor([self._seeds.base or 0, *self.given, *self.sizes], device="cpu")
                self._connections.tell("head", (head,), tuple(self._settings.items()))
            yield
            if not self.last:
                (loss, *state), about = self._connections.hear(
                    "loss", self.orders.placement[-1], "loss"
                )
                *self._takes, self._seeds.drew = about
                if state:
                    torch.set_rng_state(state[0].cpu())
                self.loss = loss.to(self.devices[0])

    def tell(
        self, loss: Tensor, needs: bool = False, ours: bool = False, before: Tensor | None = None
    ) -> None:
        """Tell all others the loss, whether it takes a gradient, and whether by this pipeline.

        And the state of the default generator, if that is handed on, or was not so `before`: others go on there.
        """
        super().tell(loss.detach())
        after = torch.get_rng_state()
        state = [after] * (
            not self._overlaps or (before is not None and not torch.equal(before, after))
        )
        drew = self._seeds.drew and not state
        self._connections.tell("loss", (self.loss, *state), (needs, ours, drew), "loss")

    def run(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        """Let the program do its list, in such modes."""
        connections, placement = self._connections, self.orders.placement
        links = Messages(
            connections,
            self._owner._layout(),
            placement,
            lists,
            self._seeds,
            in_order=not self._overlaps,
        )
        with self._in_place, modes():
            self.program.run(lists[connections.own], links, io, keep=keep)
        connections.deliver()  # what was not sent would be lost if the process ended now

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Do the rest, in a call of its own; return the gradients of the micro-batches' inputs, on the first rank."""
        with self._connections.call(self._serial, "backward", self.program):
            return super().backward(output_grads, keep=keep)
