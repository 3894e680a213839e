"""One rank's part of a mini-batch: what ranks agree on, the program between, and what becomes of a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe._autograd import backward_id, refuse_transforms
from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import checkpointed
from torchgpipe.distributed.links import Backward, Forward, RankFailed, Wires, check_serial
from torchgpipe.item import Item
from torchgpipe.microbatch import Flat, TensorOrTensors
from torchgpipe.observe import NOTHING, Observer
from torchgpipe.program import Program, in_order
from torchgpipe.relay import Stopped
from torchgpipe.schedule import overlaps
from torchgpipe.seeds import Seeds
from torchgpipe.skip.layout import Crossing
from torchgpipe.stage import Stage


@contextmanager
def shared_failure(wires: Wires, doing: Callable[[], str]) -> Iterator[None]:
    """Let all ranks raise if one does: tell them what is raised within, and raise here what another one tells.

    `doing` says what this rank does.
    """
    try:
        if wires.stopped:
            raise Stopped
        yield
    except Stopped:
        error = wires.failure()
        if not isinstance(error, RankFailed):  # this rank's own, in a thread that sends
            wires.fail(error, "sending")
        wires.close()
        raise error from None
    except BaseException as error:
        wires.fail(error, doing())
        wires.close()
        raise


class Step:
    """Run the partition of one rank in mini-batch number `serial`, and tell and hear what concerns all ranks.

    The first rank has the `micro_batches`, and decides how many there are and what seeds begin with. The last rank has
    the outputs. `settings` are what every rank has to call the pipeline with alike.

    Attributes:
        contents: what the layers hold, if there may be a backward.
    """

    def __init__(
        self,
        wires: Wires,
        serial: int,
        stage: Stage,
        crossings: Sequence[Crossing],
        settings: dict[str, Any],
        observer: Observer | None,
        micro_batches: list[TensorOrTensors],
    ) -> None:
        self._wires, self._serial, self._micro_batches = wires, serial, micro_batches
        self._crossings = crossings
        self._first, self._last = wires.own == 0, wires.own + 1 == wires.n
        ambient = Ambient([stage.device])
        refuse_transforms(forward_mode=ambient.grad)
        self._settings = settings | {"grad mode": ambient.grad}
        m, base = (len(micro_batches), None) if self._first else self._hear_head()
        recomputed = checkpointed(settings["checkpoint"], m) if ambient.grad else 0
        self._overlaps = overlaps(m, wires.n)
        self._seeds = Seeds(wires.n, recomputed=recomputed > 0, grad=ambient.grad, base=base)
        # A GPU's generator is its rank's own, so that no rank draws from it in between.
        self._seeded = self._overlaps and stage.device.type != "cuda"
        draws = self._seeds.of if self._seeded else in_order
        self.program = Program(stage, wires.n, m, recomputed, ambient, draws, observer)
        self.contents = [] if self.program.contents is None else [self.program.contents]

    def forward(self, finish: Callable[[list[Item]], Tensor]) -> tuple[Tensor, bool]:
        """Run every task's forward.

        The last rank passes the outputs to `finish`, which returns a scalar, and tells that to all others. Return it
        and whether it takes a gradient.
        """
        links = Forward(self._wires, self._serial, self._crossings, self._seeds, in_order=not self._overlaps)
        with self._seeds if self._seeded else NOTHING:
            if self._first:
                self._tell_head()
            outputs = self.program.forward(links, self._micro_batches)
            self._wires.release()
            for contents in self.contents:
                contents.check_kept()
            if not self._last:
                (value, *state), (needs, drew) = self._hear("tail")
                self._seeds.drew = drew
        if self._last:
            before = torch.get_rng_state()
            value = finish(outputs)
            after = torch.get_rng_state()
            needs, state = value.requires_grad, [after] * (not self._overlaps or not torch.equal(before, after))
            self._wires.tell("tail", self._serial, (value.detach().cpu(), *state), (needs, self._seeds.drew))
        elif state:
            torch.set_rng_state(state[0])
        return value, needs

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run every task's backward; return the gradients of the micro-batches' inputs, on the first rank."""
        with shared_failure(self._wires, lambda: self.program.doing):
            for contents in self.contents:
                contents.begin(backward_id())
            links = Backward(self._wires, self._serial, self._crossings)
            grads = self.program.backward(links, Ambient([self.program.stage.device]), output_grads, keep=keep)
            self._wires.release()
            # What was not sent would be lost if the process ended now.
            self._wires.flush()
            if self._wires.stopped:
                raise Stopped
        return grads

    def _tell_head(self) -> None:
        head = torch.tensor([len(self._micro_batches), self._seeds.base or 0], device="cpu")
        self._wires.tell("head", self._serial, (head,), tuple(self._settings.values()))

    def _hear_head(self) -> tuple[int, int]:
        (head,), theirs = self._hear("head")
        for (name, own), first in zip(self._settings.items(), theirs, strict=True):
            if own != first:
                raise ValueError(
                    f"every rank has to call the pipeline alike, but {name} is {first!r} on rank 0 and {own!r} on rank "
                    f"{self._wires.own}"
                )
        m, base = head.tolist()
        return m, base

    def _hear(self, what: str) -> tuple[Sequence[Any], Any]:
        message = self._wires.heard(what)
        check_serial(message, self._serial)
        return message.tensors, message.about[1]
