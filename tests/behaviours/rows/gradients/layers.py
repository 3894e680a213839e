"""Test cases with layers that are frozen, have hooks, or compute gradients in forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook

from ....library.layers import same
from ...parts.layers import WIDTH, Do, acting, between_linears, five, freeze, real, weight
from ...row import Row, amid, but_graph_never, but_never, step, steps, three


def weighted(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Do(function, weight=weight())


# Hooks.


def doubled(grad: Tensor) -> Tensor:
    return 2 * grad


def double_all(_: nn.Module, grads: Any, __: Any) -> tuple[Tensor, ...]:
    """Return twice the gradients of the inputs. This function is used as a full backward hook."""
    return tuple(2 * grad for grad in grads)


def hook_its_weight(layer: Any) -> None:
    layer.weight.register_hook(doubled)


def hook_gradients(run: Any, _: Tensor) -> None:
    run[1].register_full_backward_hook(double_all)


def hooked_once(run: Any, x: Tensor) -> None:
    """Run steps with a forward hook that removes itself when it is called."""

    def triple_once(*args: Any) -> Any:
        handle.remove()
        return 3 * args[-1]

    handle = run[1].register_forward_hook(triple_once)
    steps(run, x)


def double_of_linear(layer: nn.Module, _: Any, y: Tensor) -> Any:
    return 2 * y if isinstance(layer, nn.Linear) else None


def hooked_all(run: nn.Module, x: Tensor) -> None:
    """Run a step with a global forward hook, which is removed before the backward.

    The hook changes the outputs of all linear layers. A recomputation in backward must still do
    what the hook did in forward.
    """
    handle = register_module_forward_hook(double_of_linear)
    amid(lambda *_: handle.remove())(run, x)


def always_hooked(_: Any, x: Tensor) -> Tensor:
    y = 1 * x
    y.register_hook(doubled)
    return y


# Layers.


def gradients_of_samples(x: Tensor) -> Tensor:
    """Return the gradient of each sample's loss, using `torch.func.vmap` and `torch.func.grad`."""

    def loss(sample: Tensor) -> Tensor:
        return sample.tanh().square().sum()

    grads: Tensor = torch.func.vmap(torch.func.grad(loss))(x)
    return grads


@forward_ad.dual_level()
def times_tangent(x: Tensor) -> Tensor:
    dual = forward_ad.make_dual(x, torch.ones_like(x))
    tangent: Tensor = forward_ad.unpack_dual(dual.tanh()).tangent
    return x * tangent


def keeps_its_output(self: Any, x: Tensor) -> Tensor:
    self.kept = x * self.weight
    return self.kept


def keeping() -> nn.Module:
    return Do(keeps_its_output, kept=torch.zeros(1), weight=weight())


def times_gradient(self: Any, x: Tensor) -> Tensor:
    grad = self.weight.grad
    return x * self.weight * (1 if grad is None else grad.clone())


def differentiated(self: Any, x: Tensor) -> Tensor:
    sines = (x.sin() * self.weight).sum()
    return torch.autograd.grad(sines, x, create_graph=True)[0]


def times_buffer(self: Any, x: Tensor) -> Tensor:
    return x * self.by


def with_trained_buffer() -> nn.Module:
    return Do(times_buffer, by=torch.rand(WIDTH).requires_grad_())


def with_made_buffer() -> nn.Module:
    return Do(times_buffer, by=torch.rand(WIDTH), scale=weight())


def times_buffer_and_count(self: Any, x: Tensor) -> Tensor:
    self.calls = self.calls + 1
    return x * self.by


def with_made_buffer_and_count() -> nn.Module:
    calls = torch.zeros(())
    return Do(times_buffer_and_count, by=torch.rand(WIDTH), scale=weight(), calls=calls)


# Uses of the model.


def thaw(run: nn.Module, _: Tensor) -> None:
    run.requires_grad_(True)


def made_by_a_hypernetwork(run: Any, x: Tensor) -> Any:
    """Run two steps of a layer whose buffer is computed from a parameter before each step.

    So the buffer has an autograd graph, through which the parameter gets a gradient.
    """
    found = []
    for _ in range(2):
        run[1].by = run[1].scale.exp()
        found.append(step(run, x))
    return found


def forgotten_in_the_end(run: Any, x: Tensor) -> Any:
    """Run steps with a layer whose buffer keeps its output with the graph; clear the buffer."""
    seen = steps(run, x)
    run[1].kept = None
    return seen


# The numbers of the layers that are frozen.
FROZEN: dict[str, tuple[int, ...]] = {
    "nothing": (),
    "the first layer": (0,),
    "the last partition": (4,),
    "all but the first": (2, 4),
    "all but the last": (0, 2),
    "everything": (0, 2, 4),
}

ROWS: list[Row] = []
for what, numbers in FROZEN.items():
    frozen = partial(freeze, five, *numbers)
    without_grad = partial(real, grad=False)
    ROWS.append(Row(f"frozen: {what}", frozen))
    ROWS.append(Row(f"frozen: {what}, input takes none", frozen, without_grad))
    # The discriminator of a GAN has to be frozen while the generator's loss is computed.
    ROWS.append(Row(f"frozen: {what}, and thawed before backward", frozen, use=amid(thaw)))
ROWS.append(
    three(
        "a layer that hooks its parameter",
        between_linears(partial(acting, hook_its_weight)),
        use=steps,
        refused=but_graph_never("hooked a parameter in its forward"),
    )
)
for what, layer in (("torch.func.grad", gradients_of_samples), ("forward_ad", times_tangent)):
    layers = between_linears(partial(same, layer))
    ROWS.append(three(f"a layer that uses `{what}`", layers, use=steps))
for what, use in (
    ("that removes itself", hooked_once),
    ("of gradients after forward", amid(hook_gradients)),
):
    without = {"ranks": "they have other copies of the layers"}
    ROWS.append(Row(f"a hook {what}", use=use, without=without))
ROWS += [
    Row(
        "a hook of all modules during forward",
        use=hooked_all,
        refused=but_never("'hooks of all modules' of .* was changed"),
    ),
    Row(
        "a parameter thawed in forward",
        partial(freeze, between_linears(partial(acting, nn.Module.requires_grad_)), 1),
        balance=(1, 2),
        without={
            "ranks": "what takes a gradient there does not come back to the process that compares"
        },
    ),
    three("a buffer that takes a gradient", between_linears(with_trained_buffer), use=steps),
    three(
        "a buffer that a hypernetwork makes",
        between_linears(with_made_buffer),
        use=made_by_a_hypernetwork,
        note="In each step, the hypernetwork computes a new tensor, which takes the place of the "
        "buffer.",
    ),
    three(
        "a buffer that a hypernetwork makes, beside one that changes",
        between_linears(with_made_buffer_and_count),
        use=made_by_a_hypernetwork,
    ),
    three(
        "a buffer that keeps an output with its graph",
        between_linears(keeping),
        use=forgotten_in_the_end,
    ),
    three(
        "a layer that reads its gradient",
        between_linears(partial(weighted, times_gradient)),
        refused=but_never("reads the gradient of its parameter"),
        without={"never": "nothing watches its first pass, and the layer finds no gradient"},
    ),
]
for what, function in (("a hook", always_hooked), ("`autograd.grad`", differentiated)):
    layers = between_linears(partial(weighted, function))
    ROWS.append(three(f"{what} without a condition", layers, use=steps))
