"""One rank's part of a mini-batch: its program, and what ranks agree on before and after that."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgpipe.distributed.connections import Connections
from torchgpipe.distributed.links import Backward, Forward
from torchgpipe.engine.batch import Batch, linked, one_node
from torchgpipe.partitioned import Partitioned
from torchgpipe.task.task_graph import leaves
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, gather, tensors_of


class RankBatch(Batch):
    """Run the partition of one rank in a mini-batch, and tell and hear what concerns all ranks.

    The first rank has the `micro_batches`, and decides how many there are and what seeds begin with. The last rank has
    the outputs. `settings` are what every rank has to call the pipeline with alike, and `owner` is that pipeline.
    """

    def __init__(
        self,
        connections: Connections,
        settings: dict[str, Any],
        micro_batches: list[TensorOrTensors],
        owner: Partitioned,
    ) -> None:
        self._owner = owner  # a pipeline that is collected closes its connections
        self._connections, self._serial = connections, connections.serial
        self._micro_batches, self._crossings = micro_batches, owner._layout()
        self._settings = settings | {"grad mode": torch.is_grad_enabled()}
        self._first, self._last = connections.own == 0, connections.own + 1 == connections.n
        m, base = len(micro_batches), None
        if not self._first:
            (head,), theirs = connections.hear("head", 0)
            connections.check_alike("the pipeline", self._settings, dict(theirs), 0)
            m, base = head.tolist()
        super().__init__(owner._stages, connections.n, m, owner.checkpoint, owner.observer, base)
        (self.program,) = self.programs
        connections.liveness.activity.program = self.program

    def forward(self, finish: Callable[[TensorOrTensors], tuple[Any, Tensor]]) -> Any:
        """Run every task's forward; return what the caller gets.

        On the last rank that is what `finish` makes of the output, beside a scalar. The others get this scalar without
        its graph; if it takes a gradient, its backward is this rank's.
        """
        inputs = [x for micro_batch in self._micro_batches for x in tensors_of(micro_batch)]
        links = Forward(self._connections, self._crossings, self._seeds, in_order=not self._overlaps)
        with self._seeded:
            if self._first:
                head = torch.tensor([len(self._micro_batches), self._seeds.base or 0], device="cpu")
                self._connections.tell("head", (head,), tuple(self._settings.items()))
            outputs = self.program.forward(links, self._micro_batches)
            self._connections.deliver()
            self._check_kept()
            if not self._last:
                (scalar, *state), about = self._connections.hear("tail", self._connections.n - 1)
                needs, ours, self._seeds.drew = about
        if self._last:
            before = torch.get_rng_state()
            output = gather(linked(self, outputs, inputs))
            with self.program.computes("the criterion"):
                result, scalar = finish(output)
            through = [y for y in tensors_of(output) if y.requires_grad]
            if result is scalar and scalar.requires_grad and through:
                result = scalar = _Through.apply(scalar, *through)
            after = torch.get_rng_state()
            state = [after] * (not self._overlaps or not torch.equal(before, after))
            about = (scalar.requires_grad, scalar.requires_grad and bool(through), self._seeds.drew)
            self._connections.tell("tail", (scalar.detach().cpu(), *state), about)
            return result
        if state:
            torch.set_rng_state(state[0])
        scalar = scalar.to(self.program.stage.device)
        (scalar,) = leaves((scalar,), (needs,))
        return one_node(self, [1], (scalar,), inputs)[0] if ours else scalar

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run every task's backward; return the gradients of the micro-batches' inputs, on the first rank."""
        with self._connections.call(self._serial, "backward", self.program):
            ambient = self._begin_backward()
            links = Backward(self._connections, self._crossings)
            grads = self.program.backward(links, ambient, output_grads, keep=keep)
            self._connections.deliver()  # what was not sent would be lost if the process ended now
        return grads


class _Through(torch.autograd.Function):
    """A loss, whose backward goes on to the output also where the criterion has left that out: other ranks wait."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *output: Tensor) -> Tensor:
        ctx.width = len(output)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*grads, *[None] * ctx.width)
