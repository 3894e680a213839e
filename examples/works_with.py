"""What docs/works-with.md says of a pipeline, as code: each function takes a pipeline, or any model, and mini-batches.

Tests run each with a pipeline and with the plain layers, and compare all that it leaves.
"""

import functools
import multiprocessing
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Batches = list[tuple[Tensor, Tensor]]


def train(model: nn.Module, batches: Batches) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mixed_precision(model: nn.Module, batches: Batches) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    norms = []
    for x, target in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse_loss(model(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1))
        scaler.step(optimizer)
        scaler.update()
    return norms


def hooks_of_parameters(model: nn.Module, batches: Batches) -> Any:
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}

    def clamp(gradient: Tensor, name: str) -> Tensor:
        seen[name].append(gradient)
        return gradient.clamp(-0.1, 0.1)

    for name, p in model.named_parameters():
        p.register_hook(functools.partial(clamp, name=name))
    return train(model, batches), seen


def optimizer_in_backward(model: nn.Module, batches: Batches) -> None:
    optimizers: dict[Tensor, torch.optim.Optimizer] = {
        p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()
    }

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, target in batches:
        mse_loss(model(x), target).backward()


def hooks_of_layers(model: Any, batches: Batches) -> Any:
    of_layer: list[Tensor] = []
    of_model: list[Tensor] = []
    model[1].register_full_backward_hook(
        lambda layer, grad_input, grad_output: of_layer.append(grad_output[0])
    )
    model.register_forward_hook(lambda model, inputs, output: of_model.append(output))
    return train(model, batches), of_layer, of_model


def average_of_weights(model: nn.Module, batches: Batches) -> Any:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in batches:
        train(model, [batch])
        average.update_parameters(model)
    return average, average(batches[0][0])


def activations_on_the_host(model: nn.Module, batches: Batches) -> None:
    for x, target in batches:
        with torch.autograd.graph.save_on_cpu():
            loss = mse_loss(model(x), target)
        loss.backward()


def other_parameters(model: nn.Module, batches: Batches) -> list[Any]:
    parameters = {name: (p * 0.5).detach().requires_grad_() for name, p in model.named_parameters()}
    losses = [mse_loss(functional_call(model, parameters, (x,)), target) for x, target in batches]
    return [torch.autograd.grad(loss, list(parameters.values())) for loss in losses]


def checkpoint_files(model: nn.Module, other: nn.Module, batches: Batches) -> None:
    """Train a step and save; load into `other`, which may have another balance, and train another step."""
    optimizers = [torch.optim.Adam(each.parameters()) for each in (model, other)]
    with tempfile.TemporaryDirectory() as folder:
        mse_loss(model(batches[0][0]), batches[0][1]).backward()
        optimizers[0].step()
        weights, moments = get_state_dict(model, optimizers[0])
        save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        weights, moments = get_state_dict(other, optimizers[1])
        load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, optimizers[1], model_state_dict=weights, optim_state_dict=moments)
    mse_loss(other(batches[1][0]), batches[1][1]).backward()
    optimizers[1].step()


def forked_process(model: nn.Module, batches: Batches) -> Any:
    losses = train(model, batches)
    model.share_memory()
    child = multiprocessing.get_context("fork").Process(
        target=train, args=(model, batches), daemon=True
    )
    child.start()
    child.join(400)
    return losses, child.exitcode


@functools.cache
def _spawned() -> Executor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def spawned_process(model: nn.Module, batches: Batches) -> Any:
    return train(model, batches), _spawned().submit(train, model, batches).result(400)


def profiler(model: nn.Module, batches: Batches) -> Any:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everywhere) as profile:
        losses = train(model, batches)
    return losses, sum(
        event.count for event in profile.key_averages() if event.key == "aten::tanh_backward"
    )


def traced(model: nn.Module, batches: Batches) -> Tensor:
    (example, _), (x, _), _ = batches
    trace: nn.Module = torch.jit.trace(model, example)
    output: Tensor = trace(x)
    return output


def exported(model: nn.Module, batches: Batches) -> Tensor:
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


def steps_in_replicas(model: nn.Module, batches: Batches) -> None:
    replicate(model)
    steps(model, batches)


class WithLoss(nn.Module):
    """Return the loss of a pipeline's mini-batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.model.loss(mse_loss, x, target)


def loss_in_replicas(model: nn.Module, batches: Batches) -> None:
    replicas = nn.parallel.DistributedDataParallel(WithLoss(model))
    for x, target in batches:
        replicas(x, target).backward()


def no_sync(model: Any, batches: Batches) -> None:
    for _ in range(3):
        with model.no_sync():
            for x, target in batches[1:]:
                mse_loss(model(x), target).backward()
        x, target = batches[0]
        mse_loss(model(x), target).backward()
