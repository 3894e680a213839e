"""Run checks (short trainings) with two schedules of `torch.distributed.pipelining`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import SplitPoint
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from reproduce.run.engines.schedules import schedule
from tests.behaviours.pipe import NotOffered, Pipe, rank


class TorchGPipe(Pipe):
    """Runs a check with `ScheduleGPipe` of PyTorch."""

    package = "torch/distributed/pipelining"
    ranks = True
    schedule_name = "ScheduleGPipe"

    def build(self, layers: Any, balance: list[Any]) -> Any:
        row = self.row
        if row.checkpoint != "never":
            raise NotOffered("a schedule has no option for recomputation")
        if row.deferred_batch_norm:
            raise NotOffered("a schedule has no option for batch norm over a mini-batch")
        options: dict[str, Any] = {"loss_fn": row.criterion, "scale_grads": row.mean}
        if row.sample is None:
            begin = sum(balance[: rank()])
            end = begin + balance[rank()]
            whole = nn.Sequential(*layers)
            part = whole[begin:end]  # the slice keeps the names of the whole model
            self.schedule = schedule(self.schedule_name, part, chunks=row.chunks, **options)
            return part
        cuts = dict.fromkeys(balance, SplitPoint.BEGINNING)
        sample = row.sample.chunk(row.chunks)[0]
        traced = pipelining.pipeline(layers, (sample,), split_spec=cuts)
        stage = traced.build_stage(rank(), torch.device("cpu"))
        make = getattr(pipelining, self.schedule_name)
        self.schedule = make(stage, row.chunks, **options)
        return stage.submod

    def step(self, *given: Any) -> Pipe:
        self.module.train()
        losses: list[Tensor] = []
        self._run(self.schedule.step, given or self.row.given(), losses)
        if losses:
            loss = torch.stack([loss.detach() for loss in losses]).sum()
            if self.row.mean:
                loss = loss / len(losses)
            self.losses.append(loss)
        return self

    def evaluate(self, *given: Any) -> Pipe:
        self.module.eval()
        output = self._run(self.schedule.eval, given or self.row.given(), [])
        if output is not None:
            self.outputs.append(output)
        return self

    def _run(self, call: Any, given: Any, losses: list[Tensor]) -> Any:
        x, target = given
        first = rank() == 0
        last = rank() + 1 == dist.get_world_size()
        inputs: tuple[Any, ...] = ()
        if first:
            inputs = x if isinstance(x, tuple) else (x,)
        if last:
            return call(*inputs, target=target, losses=losses)
        return call(*inputs)

    def clip_gradients(self, norm: float) -> None:
        parameters, gradients = [], []
        for p in self.module.parameters():
            if p.grad is not None:
                parameters.append(p)
                gradients.append(p.grad)
        squares = get_total_norm(gradients) ** 2
        dist.all_reduce(squares)
        clip_grads_with_norm_(parameters, norm, squares.sqrt())

    def load_model(self, whole: dict[str, Tensor]) -> None:
        part = {name: whole[name] for name in self.module.state_dict()}
        self.module.load_state_dict(part)


class Torch1F1B(TorchGPipe):
    """Runs a check with `Schedule1F1B` of PyTorch."""

    schedule_name = "Schedule1F1B"
