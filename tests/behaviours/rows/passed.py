"""What goes in, between partitions and out, and how it is split; skips reach their layer, whatever lies between."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace

from ...plain import Plain
from ..parts.layers import WIDTH, Do, Pair, linear, made, only_a_skip, real
from ..parts.wiring import OnFirst, with_skips
from ..row import Row, step, steps
from .between import within

plain = partial(real, grad=False)
F16, BF16, C64 = torch.float16, torch.bfloat16, torch.complex64
SEVERAL = (torch.float32, torch.complex128, torch.float64)

Stashed = Callable[[Tensor, Tensor], Tensor | None]
HERE: Any = type("Here", (Pair,), {})


def first() -> nn.Module:
    return OnFirst(linear())


def ids() -> Tensor:
    return torch.arange(8).remainder(5)


def batch(size: int) -> Any:
    return lambda: torch.randn(size, WIDTH).requires_grad_()


def two() -> tuple[Tensor, Tensor]:
    return real(), real()


def with_ids() -> tuple[Tensor, Tensor]:
    return plain(), ids()


def of(*layers: Any) -> Any:
    """Return what makes a model: modules are given as what makes them, functions as they are."""
    return made(*(x if x in (linear, first) else partial(lambda x: x, x) for x in layers))


def typed(*types: torch.dtype) -> Any:
    """Return what makes layers of one type after another."""

    def cast(x: Tensor, to: torch.dtype) -> Tensor:
        return (x.real if x.is_complex() and not to.is_complex else x).to(to)

    return made(
        *(
            make
            for d in types
            for make in (
                lambda d=d: partial(cast, to=d),
                lambda d=d: nn.Linear(WIDTH, WIDTH, dtype=d),
                nn.Tanh,
            )
        )
    )


def of_input(x: Tensor, _: Tensor) -> Tensor:
    return x.tanh()


def stashing(names: str = "a", stashed: Stashed = of_input, *, pops: str = "") -> Any:
    """Return a linear layer that stashes and pops skips of one letter."""
    return with_skips(linear(), dict.fromkeys(names, stashed), dict.fromkeys(pops, torch.mul))


def popping(names: str = "a") -> Any:
    return stashing("", pops=names)


def paired(pattern: str, stashed: Stashed = of_input) -> nn.Sequential:
    """Lay out layers: `[` stashes, `]` pops the latest, `)` the earliest of those open, `-` is a linear layer."""
    open: list[Namespace] = []
    layers: list[Any] = []
    for symbol in pattern:
        if symbol == "[":
            open.append(Namespace())
            layers.append(stashing("a", stashed).isolate(open[-1]))
        elif symbol in "])":
            layers.append(popping().isolate(open.pop(-1 if symbol == "]" else 0)))
        else:
            layers.append(linear())
    return nn.Sequential(*layers)


def output_changed(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        stashing("a", lambda x, y: y), *between, nn.ReLU(inplace=True), linear(), popping()
    )


def marked(x: Tensor, **attributes: Any) -> Tensor:
    y = x.tanh()
    vars(y).update(attributes or {"scale": 3.0, "names": ["a", (1, {"b": None})]})
    return y


def scaled(x: Any) -> Tensor:
    return x * float(getattr(x, "scale", 1.0)) * len(getattr(x, "names", "x"))


def handing_on(make: Any, take: Any) -> Any:
    """Return what makes layers of which one hands on two tensors by name."""
    return made(
        linear,
        lambda: Do(lambda _, x: make((x.tanh(), x.argmax(1, keepdim=True)))),
        nn.Identity,
        lambda: Do(lambda _, value: take(value)),
    )


def named_out(run: nn.Module, x: Tensor) -> Any:
    y = run(x)
    return isinstance(run, Plain) or type(y) is Pair, y[0]


def undivided(run: Any, x: Tensor) -> Any:
    y = (
        run(x) if not isinstance(run, Plain) else nn.Sequential.forward(run, x)
    )  # without concatenation
    y.backward()
    return y.detach()


def asking(a: Tensor, b: Tensor) -> Tensor:
    return (a if a.requires_grad else a.exp()) + (b.exp() if b.requires_grad else b)


def at_last(run: Any, x: Tensor) -> Any:
    """Detach from the second step on. That one does not see it; return what the third shows."""
    for number in range(3):
        run[1].detach, x.grad = number > 0, None
        shown = step(run, x)
    return shown


# Layers, and layers per partition.
CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "from end to end": (lambda: paired("[--]"), (1, 1, 1, 1)),
    "two from one layer": (
        lambda: nn.Sequential(stashing("ab"), nn.Sigmoid(), popping("ba")),
        (1, 1, 1),
    ),
    "popped and stashed at once": (
        lambda: nn.Sequential(stashing(), stashing("b", pops="a"), popping("b")),
        (1, 1, 1),
    ),
    "only the skip takes a gradient": (only_a_skip, (2, 1)),
    "none": (lambda: paired("[-]", lambda x, y: None), (1, 1, 1)),
    "none within": (lambda: paired("[]-", lambda x, y: None), (2, 1)),
    "none for some micro-batches": (
        lambda: paired("[-]", lambda x, y: x.sin() if x[0, 0] > 0 else None),
        (1, 1, 1),
    ),
    "detached": (lambda: paired("[-]", lambda x, y: x.detach().sin()), (1, 1, 1)),
    "integer": (lambda: paired("[-]", lambda x, y: x.argmax(1, keepdim=True)), (1, 1, 1)),
    "the input itself": (lambda: paired("[-]", lambda x, y: x), (1, 1, 1)),
    "a constant": (
        lambda: paired("[-]", lambda x, y: torch.full_like(x, 2, requires_grad=False)),
        (1, 1, 1),
    ),
}
PATTERN = "[[-][])"
WHOLE = {"ranks": "skips go straight from rank to rank"}
SHARES = "changed an input in place that shares memory"
# Without a boundary between the two layers, both change as one; and one graph sees what each changes.
APART = {"": SHARES, "graph never": ""}

ROWS = [
    Row("in, one without grad", of(lambda a, b: a * b, linear, linear), lambda: (plain(), real())),
    Row("in, unused", of(lambda a, b: a, linear, linear), two),
    Row("of one", of(lambda a: (a,), first, first), lambda: (real(),)),
    Row("out", of(linear, linear, lambda a: (a, a.sum(1)))),
    Row("all the way", of(first, first, first), two),
    Row(
        "longer and shorter",
        of(lambda a, b: (a, b, a + b), lambda a, b, c: (a * c, b), lambda a, b: (a, b, a, b)),
        two,
    ),
    Row("the same tensor twice", of(lambda a: (a, a), lambda a, b: a * b, linear)),
    Row("an input is an output", of(lambda a: a, lambda a: (a, a.exp()), lambda a, b: (b, a))),
    Row(
        "views",
        of(lambda a: (a[:, :2], a.view(-1, 2, 2)), lambda a, b: a + b.sum(1), lambda a: a.t().t()),
    ),
    Row(
        "an integer goes along",
        of(first, lambda a, k: (a * (1 + k).unsqueeze(1), k), lambda a, k: (a[:, :2], k)),
        with_ids,
    ),
    Row(
        "an integer is made",
        of(linear, lambda a: (a, a.argmax(1)), lambda a, k: (a.gather(1, k.unsqueeze(1)), k)),
    ),
    Row(
        "an integer is first",
        of(lambda a: (a.argmax(1), a), lambda k, a: (k, a.exp()), lambda k, a: (k, a)),
    ),
    Row("detached", of(linear, lambda a: (a, a.detach()), lambda a, b: (a * b, b))),
    *(
        Row(
            what,
            made(
                linear,
                lambda: Do(lambda self, a: (a, a.detach() if self.detach else 1 * a), detach=True),
                lambda: asking,
                linear,
            ),
            balance=(2, 2),
            use=use,
        )
        for what, use in (
            ("detached, and the next partition asks", steps),
            ("detached from some step on", at_last),
        )
    ),
    Row(
        "a layer that asks what takes a gradient",
        of(linear, lambda x: x * (3 if x.requires_grad else 4), linear),
        use=steps,
        balance=(2, 1),
    ),
    Row("nothing takes grad", of(*[lambda a, k: (a, k)] * 3), with_ids),
    Row("only integers", of(lambda k: k + 1, lambda k: (k, k), lambda k, n: k * n), ids),
    Row("no parameters", of(torch.sin, torch.exp, torch.square)),
    Row("a loss of one micro-batch", of(linear, linear, Tensor.sum), chunks=1, use=undivided),
    Row(
        "nothing",
        of(linear, lambda a: None, linear),
        refused={"": "output of partition 1 must be .* got NoneType"},
    ),
    Row(
        "a number",
        of(linear, lambda a: (a, 2.0), linear),
        refused={"": "of partition 1 must .* element 1 is float"},
    ),
    Row("no output", of(linear, lambda a: (), linear), refused={"": "got an empty tuple"}),
    Row(
        "a tensor or a tuple",
        of(linear, linear, lambda a: a if len(a) > 2 else (a,)),
        refused={"": "micro-batch 0 returned a tensor and micro-batch 2 a tuple of 1"},
    ),
    *(
        Row(
            f"a scalar in, {m} micro-batches",
            of(lambda *_: _[0], linear, linear),
            lambda: (real(), torch.tensor(1.0)),
            chunks=m,
            refused={"": "needs a batch dimension, but tensor 1 is a scalar"},
        )
        for m in (1, 3)
    ),
    Row(
        "two batch sizes in",
        of(lambda a, b: a, linear, linear),
        lambda: (real(), torch.zeros(4)),
        refused={"": r"one batch size \(dimension 0\), but they have \[8, 4\]"},
    ),
    Row(
        "a loss beside a tensor",
        of(linear, linear, lambda a: (a, a.sum())),
        refused={"": "returned a scalar"},
    ),
    Row("a loss", of(linear, linear, Tensor.sum), refused={"": "returned a scalar; move a loss"}),
    Row(
        "attributes of tensors (`y.scale = 3.0`)",
        of(linear, marked, lambda x: x, scaled),
        note="Between ranks: numbers, strings, and tuples, lists and dictionaries of them.",
    ),
    Row(
        "attributes of a skip",
        lambda: nn.Sequential(
            stashing("a", lambda x, y: marked(x)),
            linear(),
            with_skips(linear(), {}, {"a": lambda y, skip: y * scaled(skip)}),
        ),
    ),
    Row(
        "an attribute that is not plain",
        of(linear, partial(marked, scale=Fraction(3, 2)), scaled),
        balance=(2, 1),
        refused={"ranks": r"outputs of partition 0 have attributes \(scale\)"},
    ),
    Row(
        "an attribute that takes a gradient",
        of(linear, lambda x: marked(x, more=x.sin()), lambda x: x * x.more),
        refused={"graph never": "", "": "attribute.*more"},
        balance=(2, 1),
    ),
    Row(
        "named tuples between layers",
        handing_on(Pair._make, lambda two: two.one * two.other),
        note="Between ranks, if their class is at the top of a module.",
    ),
    Row(
        "a named tuple of PyTorch",
        handing_on(torch.return_types.max, lambda two: two.values * two.indices),
    ),
    Row(
        "a named tuple of no module",
        handing_on(HERE._make, lambda two: two.one * two.other),
        refused={"ranks": "which ranks do not find"},
    ),
    Row(
        "a named tuple out",
        made(linear, linear, lambda: Do(lambda _, x: Pair(x.tanh(), x))),
        use=named_out,
        without={"ranks": "other ranks show what the last one has"},
    ),
    *(
        Row(f"types {d}", typed(d), partial(torch.randn, 8, WIDTH, dtype=d, requires_grad=True))
        for d in (F16, BF16, C64)
    ),
    Row("several types", typed(*SEVERAL), balance=(2, 2, 2, 3)),
    *(
        Row(f"{b} samples, {m} micro-batches", given=batch(b), chunks=m)
        for b, m in ((13, 8), (13, 2), (8, 8), (8, 3), (1, 2), (1, 20), (0, 3), (8, 20))
    ),
    *(
        Row(f"a balance of {balance}", given=batch(13), balance=balance, chunks=8)
        for balance in ((2, 3), (2, 1, 1, 1), (1, 1, 3))
    ),
    *(
        Row(
            f"without {switch}",
            given=batch(13),
            balance=(2, 1, 1, 1),
            chunks=8,
            options={switch: False},
            without={"ranks": "they have no such components"},
        )
        for switch in ("dependency", "portals", "copy_streams")
    ),
    *(
        Row(
            f"{what}{how}",
            build,
            partial(real, grad=grad),
            balance,
            options=options,
            without=without,
        )
        for what, (build, balance) in CASES.items()
        for how, grad, options, without in (
            ("", True, {}, {}),
            (", input takes none", False, {}, {}),
            (", through", True, {"portals": False}, WHOLE),
        )
    ),
    *(
        Row(
            f"{PATTERN} at {a} and {b}{how}",
            partial(paired, PATTERN),
            balance=(a, b - a, 7 - b),
            options=options,
            without={
                "one partition": "once is enough",
                "one micro-batch": "likewise",
                "observed": "likewise",
                **more,
            },
        )
        for a, b in combinations(range(1, 7), 2)
        for how, options, more in (("", {}, {}), (", through", {"portals": False}, WHOLE))
    ),
    *(
        Row(
            f"a skip that is the output changed in place, {balance}",
            output_changed,
            balance=balance,
            use=steps,
            refused=refused,
        )
        for balance, refused in (((2, 2), {}), ((1, 3), APART), ((1, 1, 2), APART))
    ),
    # The partition between hands on what shares memory with a skip.
    Row(
        "a skip that is the output, handed on and changed in place",
        lambda: output_changed(nn.Identity()),
        balance=(1, 1, 3),
        use=steps,
        refused=APART,
    ),
    Row(
        "likewise without a gradient",
        output_changed,
        balance=(1, 3),
        use=within(torch.no_grad),
        refused={"workers": SHARES, "ranks": SHARES},
    ),
]
