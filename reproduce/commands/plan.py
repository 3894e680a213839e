"""`python -m reproduce plan MODEL`: the best setup for a model on a node, and the largest model that fits one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import click
import torch

from reproduce.commands.predict import hardware_by_name
from reproduce.devices import Devices, find_devices
from reproduce.predict import BUILDERS
from torchgpipe.plan import Hardware, hardware_names
from torchgpipe.plan import plan as make_plan
from torchgpipe.plan.count import Counts, count
from torchgpipe.plan.planner import HERE
from torchgpipe.plan.predict import OPTIMIZERS, Predictor
from torchgpipe.plan.report import amount, parse_amount
from torchgpipe.plan.search import Impossible, search

__all__ = ["largest", "plan"]

# what it is called here -> the model, the names of its sizes, the papers' batch size, optimizer, and a sample's shape
MODELS = {
    "amoebanet": ("AmoebaNet-D", ("L", "D"), 128, "rmsprop", (3, 224, 224)),
    "unet": ("U-Net", ("B", "C"), 32, "sgd", (3, 192, 192)),
    "resnet101": ("ResNet-101", (), 128, "sgd", (3, 224, 224)),
}
STEPS = {"amoebanet": (3, 16), "unet": (1, 8)}  # by which sizes grow in the search for the largest
PROFILED = 4  # samples of a micro-batch to time layers with
MOST = {"amoebanet": (240, 4096), "unet": (96, 1024)}


def memory_amount(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """Return bytes."""
    try:
        return None if text is None else parse_amount(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def hardware_or_here(context: click.Context, parameter: click.Parameter, name: str) -> Hardware | None:
    """Return the description of that name, or nothing for a profile on the present device."""
    return None if name == HERE else hardware_by_name(context, parameter, name)


@click.command()
@click.argument("model", type=click.Choice(list(MODELS)))
@click.option("--size", type=(int, int), metavar="N N", help="(L, D) of amoebanet, (B, C) of unet.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="Default: as many as the hardware has.")
@click.option("--memory", callback=memory_amount, metavar="24GiB", help="Of each device. Default: the hardware's.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Default: the papers' in their memory tables.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help="Default: the papers'.")
@click.option(
    "--hardware",
    default="p40x8",
    show_default=True,
    callback=hardware_or_here,
    metavar="NAME|FILE|here",
    help=f"A shipped description ({', '.join(hardware_names())}), the path of one (.json), or {HERE}: time the layers on "
    "a device of this machine, one at a time.",
)
@click.option(
    "--largest",
    "find_largest",
    type=click.Choice(["depth", "width"]),
    help="Instead: the largest model that fits, naive and pipelined, growing its first or its second size.",
)
def plan(
    model: str,
    size: tuple[int, int] | None,
    devices: int | None,
    memory: float | None,
    batch_size: int | None,
    optimizer: str | None,
    hardware: Hardware | None,
    find_largest: str | None,
) -> None:
    """Plan MODEL for a node: balance, micro-batches, checkpointing; predicted, on any machine."""
    name, names, papers_batch, papers_optimizer, shape = MODELS[model]
    if bool(names) < (size is not None):
        raise click.BadParameter(f"{model} has one size only; leave --size out", param_hint="--size")
    if find_largest is not None and hardware is None:
        raise click.BadParameter(
            "the largest model is a question of memory alone: name a description, or give --memory with it",
            param_hint="--hardware here",
        )
    if find_largest is not None and not names:
        raise click.BadParameter(f"{model} has one size only, there is no largest", param_hint="--largest")
    papers_sizes: dict[str, tuple[int, ...]] = {"amoebanet": (18, 256), "unet": (5, 64)}
    sizes: tuple[int, ...] = size or papers_sizes.get(model, ())
    batch_size = batch_size or papers_batch
    optimizer = optimizer or papers_optimizer
    try:
        if find_largest is None:
            with torch.device("meta"):
                module = BUILDERS[name](*sizes)
            click.echo(f"{_named(name, names, sizes)}, batch size {batch_size}, {optimizer}")
            here = find_devices(None, None) if hardware is None else Devices("meta", devices or 1)
            with here.in_use():
                found = make_plan(
                    module, torch.rand(min(batch_size, PROFILED), *shape, device=here.first(1)[0]),
                    batch_size=batch_size, devices=devices or (here.count if hardware is None else None),
                    memory=memory, hardware=hardware or HERE, optimizer=optimizer,
                )  # fmt: skip
            click.echo(f"\n{found}")
            return
    except (TypeError, ValueError) as error:  # a size that the model cannot have, or a plan that is impossible
        raise click.ClickException(str(error)) from None

    assert hardware is not None
    devices = devices or hardware.devices
    memory = memory or hardware.memory
    axis = ("depth", "width").index(find_largest)

    def fits(count_of: Counts, how: str) -> bool:
        return _fits(Predictor(count_of, hardware), how, batch_size, devices, memory, OPTIMIZERS[optimizer])

    click.echo(f"largest {name} on {devices} device(s) of {amount(memory)}, batch size {batch_size}, {optimizer}:")
    for how in ("naive", "pipelined"):
        best, counted = largest(model, sizes, axis, lambda c, how=how: fits(c, how))  # type: ignore[misc]
        if best is None or counted is None:
            click.echo(f"  {how:10} none: not even {_named(name, names, _smallest(model, sizes, axis))} fits")
            continue
        parameters = sum(layer.parameters for layer in counted.low) // 4
        click.echo(f"  {how:10} {_named(name, names, best)}: {parameters / 1e6:,.1f} M parameters")
    click.echo(
        f"Only {names[axis]} grows. naive: one micro-batch, nothing recomputed;\n"
        "pipelined: micro-batches of one, all but the last recomputed.\n"
        "Predicted bytes allocated to tensors, not measured: leave room for what\n"
        "libraries and the allocator take beside them."
    )


def largest(
    model: str, sizes: Sequence[int], axis: int, fits: Callable[[Counts], bool]
) -> tuple[tuple[int, ...] | None, Counts | None]:
    """Return the largest size along one axis that fits, found by bisection, and its counts; None where none does."""
    name, _, _, _, shape = MODELS[model]
    step, most = STEPS[model][axis], MOST[model][axis]
    low, high = 0, most // step  # low fits, high + 1 does not
    best, counted = None, None
    while low < high:
        middle = (low + high + 1) // 2
        tried = _with(sizes, axis, middle * step)
        counts = _counts(name, tried, shape)
        if fits(counts):
            low, best, counted = middle, tried, counts
        else:
            high = middle - 1
    return best, counted


def _fits(predictor: Predictor, how: str, batch_size: int, devices: int, memory: float, state: int) -> bool:
    layers = len(predictor.counts)
    try:
        search(
            predictor,
            batch_size=batch_size,
            devices=devices,
            memory=memory,
            state=state,
            chunks=[1] if how == "naive" else [batch_size],
            checkpoint=["never"] if how == "naive" else ["except_last"],
            partitions=[min(devices, layers)],
            wanted=1,
        )
    except Impossible:
        return False
    return True


@functools.cache
def _counts(name: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Counts:
    with torch.device("meta"):
        return count(BUILDERS[name](*sizes), torch.empty(1, *shape))


def _with(sizes: Sequence[int], axis: int, value: int) -> tuple[int, ...]:
    return tuple(value if i == axis else size for i, size in enumerate(sizes))


def _smallest(model: str, sizes: Sequence[int], axis: int) -> tuple[int, ...]:
    return _with(sizes, axis, STEPS[model][axis])


def _named(name: str, names: Sequence[str], sizes: Sequence[int]) -> str:
    return name if not names else f"{name} ({', '.join(map(str, sizes))})"
