"""Define the class that runs checks (short trainings) with DeepSpeed's `PipelineModule`.

DeepSpeed's function `train_batch` runs a training step, which includes the step of the optimizer.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import deepspeed
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.optim import SGD

from tests.behaviours.pipe import NotOffered, Pipe, Tensors, micro_batches


class DeepSpeed(Pipe):
    """Runs a check (a short training) with DeepSpeed's `PipelineModule`."""

    package = "deepspeed"
    ranks = True

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        row = self.row
        if row.sample is not None:
            raise NotOffered("it takes a list of layers")
        if row.deferred_batch_norm:
            raise NotOffered("batch norm is by micro-batch")
        deepspeed.init_distributed("gloo")  # DeepSpeed uses the existing process group
        module = made(layers, balance, self._criterion, row.checkpoint == "always")
        parameters = module.parameters()
        optimizer = row.optimizer(parameters) if row.optimizer else SGD(parameters, lr=0.0)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # only used to count samples for the log
            "gradient_accumulation_steps": row.chunks,
            "gradient_clipping": row.clip or 0.0,
            "steps_per_print": 10**9,
        }
        started = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.engine = started[0]
        self.engine.optimizer.register_step_pre_hook(self._keep)
        self._kept: list[Tensors] = []
        named = nn.Module()  # here, tied layers have the names that they have in the whole model
        for name, layer in module._modules.items():
            if name != "tied_modules":
                named._modules[name] = layer
        named._modules.update(module.tied_modules._modules)
        return named

    def _keep(self, *_: Any) -> None:
        kept: Tensors = {}
        for name, gradient in super().gradients().items():
            kept[name] = None if gradient is None else gradient.clone()
        self._kept.append(kept)

    def _criterion(self, output: Any, target: Any) -> Tensor:
        loss = self.row.criterion(output, target)
        if not self.row.mean:
            loss = loss * self.engine.gradient_accumulation_steps()
        return loss

    def step(self, *given: Any) -> Pipe:
        if self._kept:
            raise NotOffered("train_batch always steps the optimizer and clears the gradients")
        engine = self.engine
        batch = micro_batches(given or self.row.given(), self.row.chunks)
        if len(batch) != engine.gradient_accumulation_steps():
            engine.set_train_batch_size(len(batch))
        loss = engine.train_batch(iter(batch))
        self.losses.append(loss)
        return self

    def train(self, *given: Any) -> Pipe:
        self.step(*given)
        self._kept.clear()
        return self

    def evaluate(self, *given: Any) -> Pipe:
        # `eval_batch` returns only the output of the last micro-batch. So the whole mini-batch runs
        # as one micro-batch.
        whole = given or self.row.given()
        one = {"return_logits": True, "num_micro_batches": 1}
        _, output = self.engine.eval_batch(iter([whole]), **one)
        if output is not None:
            self.outputs.append(output)
        return self

    def gradients(self) -> Tensors:
        return self._kept[0] if self._kept else super().gradients()

    def save(self) -> None:
        self.engine.save_checkpoint(str(self.folder), tag="saved")

    def load(self) -> None:
        alone = self.row.optimizer is None
        self.engine.load_checkpoint(str(self.folder), tag="saved", load_module_only=alone)


def made(layers: nn.Sequential, balance: list[int], criterion: Any, recomputed: bool) -> Any:
    """Return a `PipelineModule` with the given number of layers in each partition.

    A layer that shares its weight with a layer of another partition becomes a `TiedLayerSpec`.
    """
    ends = list(accumulate(balance))

    class Balanced(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: str = "") -> None:
            self.parts = [0, *ends]
            self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def spec(layer: Any) -> Any:
        weight = getattr(layer, "weight", None)
        if weight is None:
            return layer
        same, partitions = [], set()
        for i, other in enumerate(layers):
            if getattr(other, "weight", None) is weight:
                same.append(i)
                partitions.add(bisect_right(ends, i))
        if len(partitions) < 2:
            return layer
        sizes = layer.in_features, layer.out_features
        return TiedLayerSpec(str(same[0]), nn.Linear, *sizes, tied_weight_attr="weight")

    interval = max(balance) if recomputed else 0
    module = Balanced(
        [spec(layer) for layer in layers],
        num_stages=len(balance),
        loss_fn=criterion,
        seed_layers=True,
        activation_checkpoint_interval=interval,
        dynamic_shape=True,
    )
    own = range(module.parts[module.stage_id], module.parts[module.stage_id + 1])
    for name, tied in module.tied_modules.items():
        first: Any = layers._modules[name]
        for i in own:
            layer: Any = layers[i]
            if getattr(layer, "weight", None) is first.weight:
                tied.load_state_dict(layer.state_dict())  # each layer has a bias of its own
    return module
