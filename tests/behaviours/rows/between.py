"""Modes around a pipeline reach its layers. A recomputation meets what its first pass met, or says so."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe import is_checkpointing, is_recomputing

from ..parts.layers import WIDTH, Do, linear, real
from ..row import Row, amid, loss_of, step, steps

Change = Callable[[Any, Tensor], object]
by = contextvars.ContextVar("by", default=3.0)
one_at_a_time = threading.Lock()


def block() -> nn.Module:
    """Return a layer with something inside that may be replaced."""
    return Do(
        lambda self, x: self.linear(self.norm(x)).tanh(), norm=nn.LayerNorm(WIDTH), linear=linear()
    )


def layers(last: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    dropout = nn.Dropout(0.0)
    dropout.register_forward_hook(lambda module, inputs, y: 3 * y)
    return nn.Sequential(linear(), dropout, block(), last())


def scale() -> nn.Module:
    """Scale by a constant buffer."""
    return Do(lambda self, x: x * self.by.clone(), by=torch.full((1,), 2.0))


def replaced_between_steps(run: Any, x: Tensor, replacement: Callable[[], nn.Module]) -> Any:
    before = steps(run, x)
    run[2].norm = replacement()
    return before, steps(run, x)


class Loss(Tensor):
    """A tensor subclass, whose backward runs with PyTorch's functions hidden from subclasses."""


def with_another_value(run: nn.Module, x: Tensor) -> None:
    token = by.set(2.0)
    loss = loss_of(run, x)
    by.reset(token)
    loss.backward()


# What may happen between forward and backward without any consequence, given a layer to do it to.
HARMLESS: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "evaluation of one layer": (lambda: nn.BatchNorm1d(WIDTH), lambda run, _: run[3].eval()),
    "training of a frozen norm": (
        lambda: nn.BatchNorm1d(WIDTH).eval(),
        lambda run, _: run[3].train(),
    ),
    "a constant": (scale, lambda run, _: run[3].by.fill_(7)),
    "a constant that is replaced": (
        scale,
        lambda run, _: setattr(run[3], "by", torch.full((1,), 7.0)),
    ),
    "a parameter that is replaced": (
        nn.Tanh,
        lambda run, _: setattr(run[0], "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
    ),
    "a parameter's data": (
        nn.Tanh,
        lambda run, _: setattr(run[0].weight, "data", torch.zeros(WIDTH, WIDTH)),
    ),
    "a parameter that is frozen": (nn.Tanh, lambda run, _: run[0].weight.requires_grad_(False)),
    "random numbers": (nn.Tanh, lambda run, _: torch.manual_seed(3)),
    "a forward hook removed": (nn.LeakyReLU, lambda run, _: run[1]._forward_hooks.clear()),
    "a forward hook added": (
        nn.LeakyReLU,
        lambda run, _: run[2].register_forward_hook(lambda m, i, y: 2 * y),
    ),
    "a forward pre-hook": (
        nn.LeakyReLU,
        lambda run, _: run[2].register_forward_pre_hook(lambda m, i: (2 * i[0],)),
    ),
    "what a tool writes on a layer": (nn.LeakyReLU, lambda run, _: setattr(run[3], "calls", 5)),
}

# What is refused, with what says so: by the recomputation, or by autograd, as without a pipeline.
REFUSED: dict[str, tuple[Callable[[], nn.Module], Change, str]] = {
    "a parameter changed": (nn.Tanh, lambda run, _: run[0].weight.detach().add_(1), "'weight'"),
    "a frozen parameter changed": (
        lambda: linear().requires_grad_(False),
        lambda run, _: run[3].weight.add_(1),
        "'weight'",
    ),
    "the input changed": (nn.Tanh, lambda run, x: x.detach().add_(1), "input of partition 0"),
    "an inner layer": (
        nn.Tanh,
        lambda run, _: setattr(run[2], "norm", nn.Identity()),
        "was replaced",
    ),
    "an adapter": (
        nn.Tanh,
        lambda run, _: setattr(run[2], "adapter", linear()),
        "was replaced, added",
    ),
    "a parametrization": (
        nn.Tanh,
        lambda run, _: parametrizations.weight_norm(run[2].linear),
        "was replaced",
    ),
    "a setting of a layer": (
        nn.LeakyReLU,
        lambda run, _: setattr(run[3], "negative_slope", 5.0),
        "'negative_slope' of LeakyReLU",
    ),
}

BF16, FP16 = (
    partial(torch.autocast, "cpu", torch.bfloat16),
    partial(torch.autocast, "cpu", torch.float16),
)
ON_META = partial(torch.device, "meta")


def reporting(*, training: bool = True) -> nn.Sequential:
    layers = (
        nn.Linear(WIDTH, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.0),
        parametrizations.weight_norm(nn.Linear(8, WIDTH)),
    )
    return nn.Sequential(Report(), *layers[:2], Report(), *layers[2:], Report()).train(training)


class Report(nn.Module):
    """Note the modes in which the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = [torch.is_inference_mode_enabled(), autocast, torch.get_default_device().type]
        if torch.is_inference_mode_enabled() or (
            not torch.is_grad_enabled() and not is_checkpointing()
        ):
            modes += [torch.is_grad_enabled(), is_checkpointing(), is_recomputing()]
        self.seen.add(str(modes))
        return x


def seen(run: nn.Module) -> list[str]:
    """Return what was seen by all reports; with a partition for each rank, each has one."""
    return sorted(set().union(*(m.seen for m in run.modules() if isinstance(m, Report))))


@contextmanager
def without_grad(and_then: Callable[[], Any]) -> Iterator[None]:
    with torch.no_grad(), and_then():
        yield


def within(
    forward: Callable[[], Any], backward: Callable[[], Any] = nullcontext
) -> Callable[[nn.Module, Tensor], Any]:
    """Run two forwards within a context, each with its backward within another."""

    def use(run: nn.Module, x: Tensor) -> Any:
        shown = []
        for _ in range(2):
            run.zero_grad()
            with forward():
                y = run(x)
            shown += [y.detach(), y.requires_grad, y.is_inference()]
            if y.requires_grad:
                with backward():
                    y.backward(torch.ones_like(y))
            shown.append(seen(run))
        return shown

    return use


def after_inference(run: nn.Module, x: Tensor) -> Any:
    with torch.inference_mode():
        run.eval()(x)
    return step(run.train(), x)


# What surrounds forward, and what backward: a recomputation has the modes of its forward.
PASSES: dict[str, tuple[Callable[[], Any], ...]] = {
    "no_grad": (torch.no_grad,),
    "inference_mode": (torch.inference_mode,),
    "enable_grad within no_grad": (partial(without_grad, torch.enable_grad),),
    "cached parametrizations": (partial(without_grad, parametrize.cached),),
    "autocast in forward": (BF16, nullcontext),
    "autocast in backward": (nullcontext, BF16),
    "autocast in both": (BF16, FP16),
    "default device in forward": (ON_META, nullcontext),
    "default device in backward": (nullcontext, ON_META),
}


class Functions(TorchFunctionMode):
    """Double what tanh returns, or count its calls, or multiply by their count."""

    only_watches = False

    def __init__(self, by: Callable[[list[int]], int] = lambda calls: 2) -> None:
        self.by, self.calls = by, [0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y * self.by(self.calls) if func is Tensor.tanh else y


def once(calls: list[int]) -> int:
    with one_at_a_time:
        calls[0] += 1
    return 1


class Operators(TorchDispatchMode):
    """Double what tanh returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return 2 * y if func is torch.ops.aten.tanh.default else y


@contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def met() -> nn.Sequential:
    def meet(_: Any, x: Tensor) -> Tensor:
        return x.tanh() * torch.finfo(torch.get_default_dtype()).bits

    return nn.Sequential(*(Do(meet) if k % 2 else linear() for k in range(6)))


def counted(run: nn.Module, x: Tensor, by: Any = once, *, safe: bool = False) -> list[int]:
    mode = Functions(by)
    mode.only_watches = safe
    with mode:
        y = run(x)
    y.sum().backward()
    return mode.calls


TYPE = dict.fromkeys(("workers always", "workers except_last"), "default type was")
STATE = "has state of its own"
APART = {"ranks": "each counts what its own layers call"}

ROWS = [
    *(
        Row(
            f"{what} in {where}",
            met,
            balance=(2, 2, 2),
            use=within(*contexts),
            refused=refused if one else {},
            note=""
            if one or refused
            else "Also around one of the two: a recomputation is in the modes of its forward.",
        )
        for what, mode, refused in (
            ("`TorchFunctionMode`", Functions, {}),
            ("`TorchDispatchMode`", Operators, {}),
            ("a default type", in_float64, TYPE),
        )
        for where, one, contexts in (
            ("forward", True, (mode,)),
            ("backward", True, (nullcontext, mode)),
            ("forward and backward", False, (mode, mode)),
        )
    ),
    Row(
        "a mode that counts, as `FlopCounterMode`",
        met,
        balance=(2, 2, 2),
        use=counted,
        refused={"workers": STATE},
        without=APART,
        note="Threads would count at once, unless its class says `only_watches = True`.",
    ),
    Row(
        "a mode that counts, for threads",
        met,
        balance=(2, 2, 2),
        use=partial(counted, safe=True),
        without=APART,
    ),
    Row(
        "a mode whose count matters",
        met,
        balance=(2, 2, 2),
        refused={"workers": STATE, "": "depends on state"},
        use=partial(counted, by=lambda calls: once(calls) * calls[0]),
        without={"never": "of another order"},
    ),
    *(
        Row(what, partial(layers, last), balance=(2, 2), use=amid(change))
        for what, (last, change) in HARMLESS.items()
    ),
    *(
        Row(
            what,
            partial(layers, last),
            balance=(2, 2),
            use=amid(change),
            refused={"always": says, "except_last": f"{says}|modified by an inplace operation"},
            without={"never": "then autograd alone decides"},
        )
        for what, (last, change, says) in REFUSED.items()
    ),
    Row(
        "a loss that is a tensor subclass",
        partial(
            layers, lambda: Do(lambda _, x: x * (2 if torch._C._is_torch_function_enabled() else 3))
        ),
        balance=(2, 2),
        use=lambda run, x: loss_of(run, x).as_subclass(Loss).backward(),
        note="As without a pipeline.",
    ),
    Row(
        "a context variable",
        lambda: nn.Sequential(
            *(Do(lambda _, x: x * by.get()) if k % 2 else linear() for k in range(4))
        ),
        balance=(2, 2),
        use=with_another_value,
    ),
    *(
        Row(
            f"{kind.__name__} for the inside of a layer",
            layers,
            use=partial(replaced_between_steps, replacement=make),
        )
        for kind, make in (
            (nn.BatchNorm1d, lambda: nn.BatchNorm1d(WIDTH)),
            (nn.Dropout, lambda: nn.Dropout(0.0)),
        )
    ),
    Row("a backward in inference mode", use=within(nullcontext, torch.inference_mode)),
    *(
        Row(
            f"{what}{'' if training else ' in evaluation'}",
            partial(reporting, training=training),
            partial(real, grad=training),
            (3, 2, 2),
            use=within(*contexts),
        )
        for what, contexts in PASSES.items()
        for training in (True, False)
    ),
    Row("training after inference", reporting, balance=(3, 2, 2), use=after_inference),
]
