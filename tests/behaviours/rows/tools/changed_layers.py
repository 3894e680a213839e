"""Test cases with layers that are changed by tools, such as adapters (LoRA) and weight norm."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, parametrize

from examples.works_with import Batches, other_parameters

from ...compare import REORDERED
from ...parts.layers import Do
from ...row import but_graph_never
from .rows import ALONE, changed, then, tool


def base_and_adapter(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.base(x) + self.up(self.down(x))
    return y


def adapted(base: nn.Linear) -> nn.Module:
    """Freeze a linear layer, and add a trainable adapter to it (LoRA)."""
    down = nn.Linear(base.in_features, 2, bias=False)
    up = nn.Linear(2, base.out_features, bias=False)
    base.requires_grad_(False)
    return Do(base_and_adapter, base=base, down=down, up=up)


def adapt(layers: Any) -> None:
    layers.requires_grad_(False)
    layers[1].linear = adapted(layers[1].linear)


def replace_last(run: Any) -> None:
    setattr(run, "3", adapted(run[3]))


def weight_norm_of_first(layers: Any) -> None:
    parametrizations.weight_norm(layers[0])


def weight_norm_of_last(run: Any) -> None:
    parametrizations.weight_norm(run[3])


def spectral_norm_of_first(layers: Any) -> None:
    parametrizations.spectral_norm(layers[0])


def cached_parametrizations(run: nn.Module, batches: Batches) -> None:
    x, target = batches[0]
    with parametrize.cached():
        loss = mse_loss(run(x), target)
    loss.backward()


def gradient_penalty(run: nn.Module, batches: Batches) -> None:
    for x, target in batches:
        x.requires_grad_()
        loss = mse_loss(run(x), target)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()


def transforms(run: nn.Module, batches: Batches) -> Any:
    parameters = {name: p.detach() for name, p in run.named_parameters()}
    inputs = torch.stack([x for x, _ in batches])

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        y: Tensor = functional_call(run, parameters, (inputs[0],))
        return y.square().mean()

    gradients = torch.func.grad(loss)(parameters)
    return gradients, torch.func.vmap(run)(inputs)


def forward_mode(run: nn.Module, batches: Batches) -> Any:
    x, _ = batches[0]
    with forward_ad.dual_level():
        duals = {}
        for name, p in run.named_parameters():
            duals[name] = forward_ad.make_dual(p, torch.ones_like(p))
        y = functional_call(run, duals, (x,))
        return forward_ad.unpack_dual(y)


ROWS = [
    changed(
        "adapters (LoRA), added before wrapping",
        adapt,
        "The weights of the original layers may be frozen.",
    ),
    tool(
        "adapters (LoRA), added after wrapping",
        then(adapt),
        "An adapter may be added inside of a layer, but may not replace the whole layer.",
    ),
    tool(
        "a whole layer replaced after wrapping",
        then(replace_last),
        "Change the layers first, and wrap them in a pipeline afterwards.",
        refused={"": "a layer or partition was replaced after the pipeline was made"},
        **ALONE,
    ),
    changed(
        "`weight_norm` and other parametrizations",
        weight_norm_of_first,
        "A parametrization may also be added after the layers were wrapped in a pipeline.",
        use=then(weight_norm_of_last),
    ),
    # The layer uses its weight twice. A task adds up both gradients of the weight first.
    changed(
        "`spectral_norm`",
        spectral_norm_of_first,
        "Each micro-batch runs one step of the power iteration. A recomputation repeats this step "
        "on copies of the buffers.",
        tolerance=REORDERED,
    ),
    changed(
        "`parametrize.cached()`",
        weight_norm_of_first,
        "The cache keeps one computed weight for all micro-batches, but each micro-batch needs "
        "an autograd graph of its own. The cache works under `no_grad()`.",
        use=cached_parametrizations,
        refused=but_graph_never(r"parametrize\.cached"),
    ),
    tool(
        "`torch.func.functional_call`",
        other_parameters,
        "`functional_call` runs the whole pipeline with other parameters.",
        **ALONE,
    ),
    tool(
        "a gradient penalty (`create_graph=True`)",
        gradient_penalty,
        "A gradient penalty needs second derivatives. A pipeline has them only if all partitions "
        "and micro-batches are in one autograd graph.",
        refused=but_graph_never("create_graph=True"),
    ),
    tool(
        "`torch.func.grad`, `torch.func.vmap`",
        transforms,
        "The transforms work only if all partitions and micro-batches are in one autograd graph.",
        refused=but_graph_never(r"torch\.func transforms"),
        **ALONE,
    ),
    tool(
        "forward-mode gradients",
        forward_mode,
        "Forward-mode gradients work only if all partitions and micro-batches are in one "
        "autograd graph.",
        refused=but_graph_never("forward-mode gradients"),
        **ALONE,
    ),
]
