"""`python -m reproduce plan MODEL`: the best setup for a model on a node, and the largest model that fits one."""

from __future__ import annotations

from collections.abc import Sequence

import click
import torch

from reproduce import models
from reproduce.cli.predict import hardware_by_name
from reproduce.machine.devices import Devices, find_devices
from reproduce.predict.largest import MODELS, Asked, largest
from torchgpipe.plan import Hardware, hardware_names
from torchgpipe.plan import plan as make_plan
from torchgpipe.plan.amount import amount, parse_amount
from torchgpipe.plan.optimizer import OPTIMIZERS
from torchgpipe.plan.planner import HERE

PROFILED = 4
"""Samples of the largest micro-batch that layers are timed with, unless told otherwise."""


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
    help=f"A shipped description ({', '.join(hardware_names())}), the path of one (.json), or {HERE}: time the layers "
    "on a device of this machine.",
)
@click.option(
    "--profile",
    "profiled",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"With --hardware {HERE}: samples of the largest micro-batch to time layers with, at most the batch size; the "
    f"more, the less is drawn out to larger ones, and the longer it takes. Default: {PROFILED}.",
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
    profiled: int | None,
    find_largest: str | None,
) -> None:
    """Plan MODEL for a node: balance, micro-batches, checkpointing; predicted, on any machine."""
    name, papers_batch, papers_optimizer = MODELS[model]
    built = models.MODELS[name]
    names = built.sizes
    if bool(names) < (size is not None):
        raise click.BadParameter(f"{model} has one size only; leave --size out", param_hint="--size")
    if profiled is not None and hardware is not None:
        raise click.BadParameter(
            f"nothing is timed with a description; leave it out, or say --hardware {HERE}", param_hint="--profile"
        )
    if find_largest is not None and hardware is None:
        raise click.BadParameter(
            "the largest model is a question of memory alone, nothing is timed for it: name a description",
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
                module = built.build(*sizes)
            click.echo(f"{_named(name, sizes)}, batch size {batch_size}, {optimizer}")
            here = find_devices(None, None) if hardware is None else Devices("meta", devices or 1)
            with here.in_use():
                found = make_plan(
                    module,
                    torch.rand(min(batch_size, profiled or PROFILED), *built.input_shape, device=here.first(1)[0]),
                    batch_size=batch_size, devices=devices or (here.count if hardware is None else None),
                    memory=memory, hardware=hardware or HERE, optimizer=optimizer,
                )  # fmt: skip
            click.echo(f"\n{found}")
        else:
            assert hardware is not None
            _tell_largest(
                Asked(model, sizes, batch_size, devices or hardware.devices,
                      memory or hardware.memory, optimizer, hardware),
                ("depth", "width").index(find_largest),
            )  # fmt: skip
    except (TypeError, ValueError) as error:  # a size that the model cannot have, or a plan that is impossible
        raise click.ClickException(str(error)) from None


def _tell_largest(asked: Asked, axis: int) -> None:
    name = MODELS[asked.model][0]
    click.echo(
        f"largest {name} on {asked.devices} device(s) of {amount(asked.memory)}, batch size {asked.batch_size}, "
        f"{asked.optimizer}:"
    )
    for how in ("naive", "pipelined"):
        found = largest(asked, how, axis, lambda sizes: click.echo(f"  trying {_named(name, sizes)}", err=True))
        if found.sizes is None:
            click.echo(f"  {how:10} none: not even {_named(name, found.beyond or ())} fits")
            continue
        at_least = "" if found.beyond is not None else "at least "
        click.echo(f"  {how:10} {at_least}{_named(name, found.sizes)}: {found.parameters / 1e6:,.1f} M parameters")
    click.echo(
        f"Only {models.MODELS[name].sizes[axis]} grows. naive: one micro-batch, nothing recomputed;\n"
        "pipelined: micro-batches of one, all but the last recomputed.\n"
        "Predicted bytes allocated to tensors, not measured: leave room for what\n"
        "libraries and the allocator take beside them."
    )


def _named(name: str, sizes: Sequence[int]) -> str:
    return f"{name} ({', '.join(map(str, sizes))})" if sizes else name
