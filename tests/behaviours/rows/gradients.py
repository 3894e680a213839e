"""Backward: through frozen layers, through parts of the outputs, twice, accumulated, and in any order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ...library.layers import same
from ..compare import REORDERED
from ..parts.layers import WIDTH, Do, acting, five, freeze, linear, made, real, weight
from ..row import Row, amid, loss_of, step, steps


def thawed_between_steps(run: nn.Module, _: Tensor) -> list[Any]:
    found = []
    for frozen in (True, False, True):
        run.zero_grad()
        next(run.parameters()).requires_grad_(not frozen)
        loss_of(run).backward()
        found += [None if p.grad is None else p.grad.clone() for p in run.parameters()]
    return found


def hooked_layers(run: Any, x: Tensor) -> None:
    run[2].register_full_backward_hook(lambda layer, grads, _: tuple(g * 2 for g in grads))
    run[3].register_forward_hook(lambda layer, args, y: y * 3)
    loss_of(run, x).backward()


def where_they_are(run: nn.Module, x: Tensor) -> list[bool]:
    """Gradients that are views of one tensor, as some optimizers have them."""
    parameters = [*run.parameters()]
    views = torch.zeros(len(parameters), WIDTH * WIDTH)
    given = [view[: p.numel()].view_as(p) for p, view in zip(parameters, views, strict=True)]
    for p, grad in zip(parameters, given, strict=True):
        p.grad = grad
    for _ in range(2):
        loss_of(run, x).backward()
    return [bool(grad.any()) and p.grad is grad for p, grad in zip(parameters, given, strict=True)]


def twice_without_retain_graph(run: nn.Module, x: Tensor) -> None:
    """Sums keep nothing, so that the pipeline itself must refuse."""
    loss = run(x).sum()
    loss.backward()
    run.zero_grad()
    loss.backward()


def to_be_differentiated(run: nn.Module, x: Tensor) -> None:
    """A refused `create_graph=True` leaves no gradients and keeps the graph."""
    loss = loss_of(run, x)
    try:
        loss.backward(create_graph=True)
    finally:
        assert all(p.grad is None for p in run.parameters())
        loss.backward()
        assert all(p.grad is not None for p in run.parameters())
        run.zero_grad()


def always_hooked(_: Any, x: Tensor) -> Tensor:
    y = 1 * x
    y.register_hook(lambda grad: 2 * grad)
    return y


def of_samples(x: Tensor) -> Tensor:
    grads: Tensor = torch.func.vmap(torch.func.grad(lambda sample: sample.tanh().square().sum()))(x)
    return grads


def hooked_once(run: Any, x: Tensor) -> None:
    handle: Any = run[1].register_forward_hook(lambda layer, args, y: (handle.remove(), 3 * y)[1])
    steps(run, x)


def hooked_all(run: nn.Module, x: Tensor) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda layer, args, y: 2 * y if isinstance(layer, nn.Linear) else None
    )
    amid(lambda *_: handle.remove())(run, x)


def keeps_its_output(self: Any, x: Tensor) -> Tensor:
    self.kept = x * self.weight
    return self.kept


def reading() -> nn.Module:
    return Do(
        lambda self, x: (
            x * self.weight * (1 if self.weight.grad is None else self.weight.grad.clone())
        ),
        weight=weight(),
    )


FROZEN: dict[str, tuple[int, ...]] = {
    "nothing": (),
    "the first layer": (0,),
    "the last partition": (4,),
    "all but the first": (2, 4),
    "all but the last": (0, 2),
    "everything": (0, 2, 4),
}

# What to go backward from, given a tuple of outputs with 4 and 3 features, of 8 samples in chunks of 3.
PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the one": lambda a, b: a.square().sum(),
    "the other": lambda a, b: b.square().sum(),
    "last sample": lambda a, b: a[-1].sum(),
    "middle micro-batch": lambda a, b: b[3:6].exp().sum(),
    "different samples": lambda a, b: a[:2].sum() * b[5:].sum(),
    "indexed": lambda a, b: a[[0, 5, 5]].square().sum(),
    "one through a detour": lambda a, b: (a + b.detach().sum()).square().sum(),
    "changed in place": lambda a, b: a.add_(1).mul_(2).square().sum() + b.sin_().sum(),
    "hooked": lambda a, b: (a.register_hook(lambda grad: grad * 3), a.square().sum() + b.sum())[1],
}

Use = Callable[[Any, Tensor], Any]

# What is done with a model. Exact:
USES: dict[str, Use] = {
    "thawed between steps": thawed_between_steps,
    "gradients given by the caller": lambda run, x: run(x).backward(
        torch.tensor(2.0).expand(8, WIDTH)
    ),
    "hooks of layers": hooked_layers,
    "gradients stay where they are": where_they_are,
    "grad twice": lambda run, x: [
        torch.autograd.grad(loss, [x, *run.parameters()], retain_graph=retain)
        for loss in [loss_of(run, x)]
        for retain in (True, False)
    ],
    "grad of the input, then backward": lambda run, x: [
        (torch.autograd.grad(loss, x, retain_graph=True), loss.backward())
        for loss in [loss_of(run, x)]
    ],
}
OF_ONE: dict[str, Use] = {
    "`torch.autograd.grad`": lambda run, x: torch.autograd.grad(
        loss_of(run, x), [*run.parameters()][1]
    ),
    "`backward(inputs=…)`": lambda run, x: loss_of(run, x).backward(
        inputs=[[*run.parameters()][2]]
    ),
}

# A plain parameter adds up all micro-batches' gradients before .grad, a pipeline those of each mini-batch and each
# backward: so these sums are only up to rounding.
SUMS: dict[str, Use] = {
    "retain_graph, twice": lambda run, x: [
        loss.backward(retain_graph=r) for loss in [loss_of(run, x)] for r in (True, True, False)
    ],
    "several mini-batches before a backward": lambda run, x: (
        loss_of(run, x) + loss_of(run)
    ).backward(),
    "two forwards, then two backwards": lambda run, x: [
        y.backward() for y in [loss_of(run, x), loss_of(run)]
    ],
    "two forwards, then two backwards, the last first": lambda run, x: [
        loss.backward() for loss in [loss_of(run, x), loss_of(run)][::-1]
    ],
    "one after itself": lambda run, x: loss_of(run, run(x)).backward(),
}

RETAIN = "retain_graph=True"


def forgotten_in_the_end(run: Any, x: Tensor) -> Any:
    seen = steps(run, x)
    run[1].kept = None
    return seen


ROWS = [
    *(
        Row(
            f"frozen: {what}{how}",
            partial(freeze, five, *numbers),
            partial(real, grad=grad),
            use=use,
        )
        for what, numbers in FROZEN.items()
        for how, grad, use in (
            ("", True, step),
            (", input takes none", False, step),
            # As the discriminator of a GAN, which has to be frozen while the generator's loss is computed.
            (", and thawed before backward", True, amid(lambda run, _: run.requires_grad_(True))),
        )
    ),
    Row(
        "a layer that hooks its parameter",
        made(
            linear,
            partial(acting, lambda layer: layer.weight.register_hook(lambda grad: 2 * grad)),
            linear,
        ),
        balance=(2, 1),
        use=steps,
        refused={"graph never": "", "": "hooked a parameter in its forward"},
    ),
    *(
        Row(
            f"a layer that uses `{what}`",
            made(linear, partial(same, layer), linear),
            balance=(2, 1),
            use=steps,
        )
        for what, layer in (
            ("torch.func.grad", of_samples),
            (
                "forward_ad",
                forward_ad.dual_level()(
                    lambda x: (
                        x
                        * forward_ad.unpack_dual(
                            forward_ad.make_dual(x, torch.ones_like(x)).tanh()
                        ).tangent
                    )
                ),
            ),
        )
    ),
    *(
        Row(f"a hook {what}", use=use, without={"ranks": "they have other copies of the layers"})
        for what, use in (
            ("that removes itself", hooked_once),
            (
                "of gradients after forward",
                amid(
                    lambda run, _: run[1].register_full_backward_hook(
                        lambda layer, grads, _: tuple(2 * g for g in grads)
                    )
                ),
            ),
        )
    ),
    Row(
        "a hook of all modules during forward",
        use=hooked_all,
        refused=dict.fromkeys(
            ("always", "except_last"), "'hooks of all modules' of .* was changed"
        ),
    ),
    Row(
        "a parameter thawed in forward",
        partial(freeze, made(linear, partial(acting, nn.Module.requires_grad_), linear), 1),
        balance=(1, 2),
        without={
            "ranks": "what takes a gradient there does not come back to the process that compares"
        },
    ),
    Row(
        "a buffer that takes a gradient",
        made(
            linear,
            lambda: Do(lambda self, x: x * self.by, by=torch.rand(WIDTH).requires_grad_()),
            linear,
        ),
        balance=(2, 1),
        use=steps,
    ),
    Row(
        "a buffer that a hypernetwork makes",
        made(
            linear,
            lambda: Do(lambda self, x: x * self.by, by=torch.rand(WIDTH), scale=weight()),
            linear,
        ),
        balance=(2, 1),
        use=lambda run, x: [
            (setattr(run[1], "by", run[1].scale.exp()), step(run, x)) for _ in range(2)
        ],  # type: ignore[func-returns-value]
        note="Its output stands in a buffer's place, anew for each step.",
    ),
    Row(
        "a buffer that keeps an output with its graph",
        made(linear, lambda: Do(keeps_its_output, kept=torch.zeros(1), weight=weight()), linear),
        balance=(2, 1),
        use=forgotten_in_the_end,
    ),
    Row(
        "a layer that reads its gradient",
        made(linear, reading, linear),
        balance=(2, 1),
        refused=dict.fromkeys(("always", "except_last"), "reads the gradient of its parameter"),
        without={"never": "nothing watches its first pass, and the layer finds no gradient"},
    ),
    *(
        Row(
            f"{what} without a condition",
            made(linear, partial(lambda f: Do(f, weight=weight()), layer), linear),
            balance=(2, 1),
            use=steps,
        )
        for what, layer in (
            ("a hook", always_hooked),
            (
                "`autograd.grad`",
                lambda self, x: torch.autograd.grad(
                    (x.sin() * self.weight).sum(), x, create_graph=True
                )[0],
            ),
        )
    ),
    # Layers of two outputs, each with parameters of its own.
    *(
        Row(
            f"from {what}",
            partial(
                five,
                lambda: Do(
                    lambda self, x: (self.one(x), self.other(x)),
                    one=linear(),
                    other=nn.Linear(WIDTH, 3),
                ),
            ),
            use=partial(lambda part, run, x: step(run, x, lambda outputs: part(*outputs)), part),
        )
        for what, part in PARTS.items()
    ),
    *(Row(what, use=use) for what, use in USES.items()),
    *(
        Row(what, use=use, note="Of the input and of any parameter.")
        for what, use in OF_ONE.items()
    ),
    *(Row(what, use=use, tolerance=REORDERED) for what, use in SUMS.items()),
    Row("twice without retain_graph", use=twice_without_retain_graph, refused={"": RETAIN}),
    Row(
        "twice without retain_graph, one micro-batch",
        use=twice_without_retain_graph,
        refused={"": RETAIN},
        chunks=1,
    ),
    Row(
        "a backward to be differentiated",
        use=to_be_differentiated,
        refused={"always": "create_graph=True", "except_last": "create_graph=True"},
        without={"never": "it can be"},
    ),
]
