"""Pipelines of others for `benchmarks.conformance`: PyTorch's schedules, and DeepSpeed's `PipelineModule`."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.conformance_engines import NotOffered, Pipeline, Tensors, micro_batches, rank, slice_of


class OneInput(nn.Module):
    """Give a sequence as one tuple what PyTorch's stages pass as several arguments."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *args: Any) -> Any:
        """Run the layers."""
        return self.layers(args if len(args) > 1 else args[0])


class TorchGPipe(Pipeline):
    """PyTorch's `ScheduleGPipe`."""

    package = "torch/distributed/pipelining"
    schedule_name = "ScheduleGPipe"

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        from torch.distributed import pipelining

        if self.checkpoint != "never":
            raise NotOffered("a schedule has no option for recomputation")
        if self.deferred_batch_norm:
            raise NotOffered("a schedule has no option for batch norm over a mini-batch")
        if self.sample is None:
            part = nn.Sequential(*layers)[slice_of(balance, rank())]  # by index: names of a slice are those of layers
            module: nn.Module = part
            stage: Any = pipelining.PipelineStage(OneInput(part), rank(), len(balance), torch.device("cpu"))
        else:
            cuts = {name: pipelining.SplitPoint.BEGINNING for name in balance}
            sample = self.sample.chunk(self.chunks)[0]
            stage = pipelining.pipeline(layers, (sample,), split_spec=cuts).build_stage(rank(), torch.device("cpu"))
            module = stage.submod
        kind = getattr(pipelining, self.schedule_name)
        self.schedule = kind(stage, self.chunks, loss_fn=self.criterion, scale_grads=self.mean)
        return module

    def step(self, x: Any, target: Any) -> None:
        self.module.train()
        losses: list[Tensor] = []
        self._run(self.schedule.step, x, target, losses)
        if losses:
            total = torch.stack([loss.detach() for loss in losses]).sum()
            self.losses.append(total / len(losses) if self.mean else total)

    def evaluate(self, x: Any, target: Any) -> None:
        self.module.eval()
        output = self._run(self.schedule.eval, x, target, [])
        if output is not None:
            self.outputs.append(output)

    def _run(self, call: Any, x: Any, target: Any, losses: list[Tensor]) -> Any:
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
    """PyTorch's `Schedule1F1B`."""

    schedule_name = "Schedule1F1B"


class DeepSpeed(Pipeline):
    """DeepSpeed's `PipelineModule`, in which a step is `train_batch`, which steps the optimizer too."""

    package = "deepspeed"

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        import deepspeed

        if self.sample is not None:
            raise NotOffered("it takes a list of layers")
        if self.deferred_batch_norm:
            raise NotOffered("it has no option for batch norm over a mini-batch")
        if self.checkpoint == "except_last":
            raise NotOffered("recomputation is for all micro-batches or for none")
        deepspeed.init_distributed("gloo")  # which takes the group that is there
        module = deepspeed_module(layers, balance, self._criterion, self.checkpoint == "always")
        make = self.make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        config = {
            "train_micro_batch_size_per_gpu": 1,  # which nothing but the count of samples in a log depends on
            "gradient_accumulation_steps": self.chunks,
            "gradient_clipping": self.clip or 0.0,
            "steps_per_print": 10**9,
        }
        self.engine = deepspeed.initialize(model=module, optimizer=make(module.parameters()), config=config)[0]
        self.engine.optimizer.register_step_pre_hook(self._keep_gradients)
        self._kept: list[Tensors] = []
        return DeepSpeedNames(module)

    def _criterion(self, output: Any, target: Any) -> Tensor:
        loss = self.criterion(output, target)
        return loss if self.mean else loss * self.engine.gradient_accumulation_steps()

    def _keep_gradients(self, *_: Any) -> None:
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.module.named_parameters()}
        self._kept.append(gradients)

    def train(self, x: Any, target: Any) -> None:
        self.step(x, target)
        self._kept.clear()

    def step(self, x: Any, target: Any) -> None:
        if self._kept:
            raise NotOffered("train_batch always steps the optimizer and clears the gradients")
        batch = list(zip(micro_batches(x, self.chunks), micro_batches(target, self.chunks), strict=True))
        if len(batch) != self.engine.gradient_accumulation_steps():
            self.engine.set_train_batch_size(len(batch))
        self.losses.append(self.engine.train_batch(iter(batch)))

    def evaluate(self, x: Any, target: Any) -> None:
        # It returns the outputs of the last micro-batch, so let there be one.
        output = self.engine.eval_batch(iter([(x, target)]), return_logits=True, num_micro_batches=1)[1]
        if output is not None:
            self.outputs.append(output)

    def gradients(self) -> Tensors:
        return self._kept[0] if self._kept else super().gradients()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="saved")

    def load(self, folder: Path) -> None:
        own = self.make_optimizer is not None
        self.engine.load_checkpoint(str(folder), tag="saved", load_module_only=not own)


class DeepSpeedNames(nn.Module):
    """A `PipelineModule` with the names that its tied layers have in the model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._modules.update({name: layer for name, layer in module._modules.items() if name != "tied_modules"})
        self._modules.update({key: layer for key, layer in module.tied_modules._modules.items()})


def deepspeed_module(layers: nn.Sequential, balance: list[int], criterion: Any, recomputed: bool) -> Any:
    """Return a `PipelineModule` with this balance, in which a layer that is there twice is a `TiedLayerSpec`."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    class Balanced(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: str = "") -> None:
            self.parts = [0, *itertools.accumulate(balance)]
            self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def spec(layer: nn.Module) -> Any:
        weight = getattr(layer, "weight", None)
        same = [i for i, other in enumerate(layers) if weight is not None and getattr(other, "weight", None) is weight]
        if len({bisect_right(starts, i) for i in same}) < 2:  # all in one partition
            return layer
        assert isinstance(layer, nn.Linear)
        return TiedLayerSpec(str(same[0]), nn.Linear, layer.in_features, layer.out_features,
                             tied_weight_attr=["weight", "bias"])  # fmt: skip

    starts = [*itertools.accumulate(balance)]

    module = Balanced([spec(layer) for layer in layers], num_stages=len(balance), loss_fn=criterion,
                      activation_checkpoint_interval=max(balance) if recomputed else 0, seed_layers=True,
                      dynamic_shape=True)  # fmt: skip
    for name, tied in module.tied_modules.items():
        tied.load_state_dict(layers._modules[name].state_dict())
    return module
