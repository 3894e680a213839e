"""DeepSpeed's `PipelineModule`. Its step is `train_batch`, which also steps the optimizer."""

import itertools
from bisect import bisect_right
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from tests.behaviours.pipe import NotOffered, Pipe, Tensors, micro_batches


class DeepSpeed(Pipe):
    """`PipelineModule` and its engine."""

    package, ranks = "deepspeed", True

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        if (row := self.row).sample is not None or row.deferred_batch_norm:
            raise NotOffered(
                "it takes a list of layers"
                if row.sample is not None
                else "batch norm is by micro-batch"
            )
        deepspeed.init_distributed("gloo")  # it uses the existing process group
        module = made(layers, balance, self._criterion, row.checkpoint == "always")
        optimizer = (row.optimizer or torch.optim.SGD)(
            module.parameters(), **({} if row.optimizer else {"lr": 0.0})
        )
        config = {
            "train_micro_batch_size_per_gpu": 1,  # only used to count samples for the log
            "gradient_accumulation_steps": row.chunks,
            "gradient_clipping": row.clip or 0.0,
            "steps_per_print": 10**9,
        }
        self.engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
        self.engine.optimizer.register_step_pre_hook(self._keep)
        self._kept: list[Tensors] = []
        named = nn.Module()  # tied layers have their names of the model here
        named._modules.update(
            {name: layer for name, layer in module._modules.items() if name != "tied_modules"}
        )
        named._modules.update(module.tied_modules._modules)
        return named

    def _keep(self, *_: Any) -> None:
        self._kept.append(
            {name: None if x is None else x.clone() for name, x in super().gradients().items()}
        )

    def _criterion(self, output: Any, target: Any) -> Tensor:
        loss = self.row.criterion(output, target)
        return loss if self.row.mean else loss * self.engine.gradient_accumulation_steps()

    def step(self, *given: Any) -> Pipe:
        if self._kept:
            raise NotOffered("train_batch always steps the optimizer and clears the gradients")
        batch = micro_batches(given or self.row.given(), self.row.chunks)
        if len(batch) != self.engine.gradient_accumulation_steps():
            self.engine.set_train_batch_size(len(batch))
        self.losses.append(self.engine.train_batch(iter(batch)))
        return self

    def train(self, *given: Any) -> Pipe:
        self.step(*given)
        self._kept.clear()
        return self

    def evaluate(self, *given: Any) -> Pipe:
        # `eval_batch` returns only the last micro-batch's output, so use one micro-batch.
        output = self.engine.eval_batch(
            iter([given or self.row.given()]), return_logits=True, num_micro_batches=1
        )[1]
        self.outputs += [] if output is None else [output]
        return self

    def gradients(self) -> Tensors:
        return self._kept[0] if self._kept else super().gradients()

    def save(self) -> None:
        self.engine.save_checkpoint(str(self.folder), tag="saved")

    def load(self) -> None:
        self.engine.load_checkpoint(
            str(self.folder), tag="saved", load_module_only=self.row.optimizer is None
        )


def made(layers: nn.Sequential, balance: list[int], criterion: Any, recomputed: bool) -> Any:
    """Return a `PipelineModule` with this balance. A layer whose weight is shared is a `TiedLayerSpec`."""
    ends = [*itertools.accumulate(balance)]

    class Balanced(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: str = "") -> None:
            self.parts = [0, *ends]
            self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def spec(layer: Any) -> Any:
        weight = getattr(layer, "weight", None)
        same = [
            i
            for i, other in enumerate(layers)
            if weight is not None and getattr(other, "weight", None) is weight
        ]
        if len({bisect_right(ends, i) for i in same}) < 2:  # all in one partition
            return layer
        weights, sizes = ["weight", "bias"], (layer.in_features, layer.out_features)
        return TiedLayerSpec(str(same[0]), nn.Linear, *sizes, tied_weight_attr=weights)

    module = Balanced(
        [spec(layer) for layer in layers],
        num_stages=len(balance),
        loss_fn=criterion,
        seed_layers=True,
        activation_checkpoint_interval=max(balance) * recomputed,
        dynamic_shape=True,
    )
    for name, tied in module.tied_modules.items():
        tied.load_state_dict(layers._modules[name].state_dict())
    return module
