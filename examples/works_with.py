"""Show how to use the tools of docs/works-with.md with a pipeline.

Each function takes a model and mini-batches. The model is a pipeline or any other module. Tests run
each function twice: with a pipeline, and with the same layers without a pipeline. They compare the
results of both runs, and the models.
"""

import functools
import multiprocessing
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.func import functional_call
from torch.nn import Module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Batches = list[tuple[Tensor, Tensor]]


def train(model: Module, batches: Batches) -> list[float]:
    optimizer = SGD(model.parameters(), lr=0.1)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mixed_precision(model: Module, batches: Batches) -> list[Tensor]:
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    norms = []
    for x, target in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse_loss(model(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(model.parameters(), max_norm=0.1))
        scaler.step(optimizer)
        scaler.update()
    return norms


def hooks_of_parameters(model: Module, batches: Batches) -> Any:
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}

    def clamp(gradient: Tensor, name: str) -> Tensor:
        seen[name].append(gradient)
        return gradient.clamp(-0.1, 0.1)

    for name, p in model.named_parameters():
        p.register_hook(functools.partial(clamp, name=name))
    return train(model, batches), seen


def optimizer_in_backward(model: Module, batches: Batches) -> None:
    optimizers: dict[Tensor, Optimizer] = {}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        optimizers[p] = SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(step)
    for x, target in batches:
        loss = mse_loss(model(x), target)
        loss.backward()


def hooks_of_layers(model: Any, batches: Batches) -> Any:
    gradients: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep_gradient(layer: Any, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        gradients.append(grad_output[0])

    def keep_output(model: Any, inputs: Any, output: Tensor) -> None:
        outputs.append(output)

    model[1].register_full_backward_hook(keep_gradient)
    model.register_forward_hook(keep_output)
    return train(model, batches), gradients, outputs


def average_of_weights(model: Module, batches: Batches) -> Any:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in batches:
        train(model, [batch])
        average.update_parameters(model)
    x, _ = batches[0]
    return average, average(x)


def activations_on_the_host(model: Module, batches: Batches) -> None:
    for x, target in batches:
        with save_on_cpu():
            loss = mse_loss(model(x), target)
        loss.backward()


def other_parameters(model: Module, batches: Batches) -> list[Any]:
    parameters: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        half = (p * 0.5).detach()
        parameters[name] = half.requires_grad_()
    losses = []
    for x, target in batches:
        output = functional_call(model, parameters, (x,))
        losses.append(mse_loss(output, target))
    return [torch.autograd.grad(loss, list(parameters.values())) for loss in losses]


def checkpoint_files(model: Module, other: Module, batches: Batches) -> None:
    """Train `model` for a step, save its state, load it into `other`, and train `other` for a step.

    If both models are pipelines, they can have different balances.
    """
    optimizer, other_optimizer = Adam(model.parameters()), Adam(other.parameters())
    first, second, *_ = batches
    with tempfile.TemporaryDirectory() as folder:
        _step(model, optimizer, *first)
        weights, moments = get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        weights, moments = get_state_dict(other, other_optimizer)
        load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    _step(other, other_optimizer, *second)


def _step(model: Module, optimizer: Optimizer, x: Tensor, target: Tensor) -> None:
    loss = mse_loss(model(x), target)
    loss.backward()
    optimizer.step()


def forked_process(model: Module, batches: Batches) -> Any:
    losses = train(model, batches)
    model.share_memory()
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=train, args=(model, batches), daemon=True)
    child.start()
    child.join(400)
    return losses, child.exitcode


@functools.cache
def _spawned() -> Executor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn)


def spawned_process(model: Module, batches: Batches) -> Any:
    losses = train(model, batches)
    child = _spawned().submit(train, model, batches)
    return losses, child.result(400)


def profiler(model: Module, batches: Batches) -> Any:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everywhere) as profile:
        losses = train(model, batches)
    count = 0
    for event in profile.key_averages():
        if event.key == "aten::tanh_backward":
            count += event.count
    return losses, count


def traced(model: Module, batches: Batches) -> Tensor:
    (example, _), (x, _), _ = batches
    trace: Module = torch.jit.trace(model, example)
    output: Tensor = trace(x)
    return output


def exported(model: Module, batches: Batches) -> Tensor:
    (example, _), (x, _), _ = batches
    program = torch.export.export(model, (example,))
    output: Tensor = program.module()(x)
    return output


def layers_alone(model: Any, batches: Batches) -> list[Tensor]:
    layers = model[:]
    return [traced(layers, batches), exported(layers, batches)]


def steps(model: Any, batches: Batches) -> None:
    for x, target in batches:
        model.step(mse_loss, x, target)


def steps_in_replicas(model: Module, batches: Batches) -> None:
    replicate(model)
    steps(model, batches)


class WithLoss(Module):
    """A module that calls a pipeline and returns the loss of a mini-batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.model.loss(mse_loss, x, target)


def loss_in_replicas(model: Module, batches: Batches) -> None:
    replicas = DistributedDataParallel(WithLoss(model))
    for x, target in batches:
        loss = replicas(x, target)
        loss.backward()


def no_sync(model: Any, batches: Batches) -> None:
    for _ in range(3):
        with model.no_sync():
            for x, target in batches[1:]:
                loss = mse_loss(model(x), target)
                loss.backward()
        x, target = batches[0]
        loss = mse_loss(model(x), target)
        loss.backward()
