"""PyTorch's `torch.distributed.pipelining`: `ScheduleGPipe` and `Schedule1F1B`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from reproduce.run.engines.schedules import schedule
from tests.behaviours.pipe import NotOffered, Pipe, rank


class TorchGPipe(Pipe):
    """`ScheduleGPipe`."""

    package, ranks = "torch/distributed/pipelining", True
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
            module: Any = nn.Sequential(*layers)[
                begin : begin + balance[rank()]
            ]  # with the names of the whole
            self.schedule = schedule(self.schedule_name, module, chunks=row.chunks, **options)
        else:
            cuts = {name: pipelining.SplitPoint.BEGINNING for name in balance}
            sample = row.sample.chunk(row.chunks)[0]
            stage = pipelining.pipeline(layers, (sample,), split_spec=cuts).build_stage(
                rank(), torch.device("cpu")
            )
            module, self.schedule = (
                stage.submod,
                getattr(pipelining, self.schedule_name)(stage, row.chunks, **options),
            )
        return module

    def step(self, *given: Any) -> Pipe:
        self.module.train()
        losses: list[Tensor] = []
        self._run(self.schedule.step, given or self.row.given(), losses)
        if losses:
            total = torch.stack([loss.detach() for loss in losses]).sum()
            self.losses.append(total / len(losses) if self.row.mean else total)
        return self

    def evaluate(self, *given: Any) -> Pipe:
        self.module.eval()
        output = self._run(self.schedule.eval, given or self.row.given(), [])
        self.outputs += [] if output is None else [output]
        return self

    def _run(self, call: Any, given: Any, losses: list[Tensor]) -> Any:
        x, target = given
        inputs = (x if isinstance(x, tuple) else (x,)) if rank() == 0 else ()
        last = rank() + 1 == dist.get_world_size()
        return call(*inputs, **({"target": target, "losses": losses} if last else {}))

    def clip_gradients(self, norm: float) -> None:
        given = [p for p in self.module.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm([p.grad for p in given if p.grad is not None]) ** 2
        dist.all_reduce(total)
        torch.nn.utils.clip_grads_with_norm_(given, norm, total.sqrt())

    def load_model(self, whole: dict[str, Tensor]) -> None:
        self.module.load_state_dict({name: whole[name] for name in self.module.state_dict()})


class Torch1F1B(TorchGPipe):
    """`Schedule1F1B`."""

    schedule_name = "Schedule1F1B"
