"""Offer `predict`, published tables, `plan`, the best setup or the largest model, and `schedule`, which draws one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from reproduce.cli.shared import (
    COUNT,
    FILE,
    HERE,
    PATH,
    autocast,
    command,
    fp32_precision,
    hardware,
    known,
    parsed,
    shown,
    style,
)
from reproduce.error import Error
from reproduce.experiments import predictable
from reproduce.machine.devices import Devices, find_devices
from reproduce.records.places import OUT, find_record
from reproduce.records.record import load, save
from reproduce.run.recorder import prepare_folder
from reproduce.tables.layout import many

ALL = "all"
OPTIMIZERS = (
    "none",
    "sgd",
    "momentum",
    "rmsprop",
    "adagrad",
    "adam",
    "adamw",
)  # as the planner has them
HEADROOM = 0.15  # the planner's default
PROFILED = 4  # default size of the largest micro-batch that layers are timed with, in samples
IN_FLOAT32 = "the largest model is found for training in float32; leave it out"


@command(
    "predict all", "predict unet-speed --hardware h100x8 --out predicted"
)  # not the committed results/predicted
@click.argument(
    "experiments",
    nargs=-1,
    **known("experiment that can be predicted", lambda: [*predictable(), ALL]),
)
@click.option(
    "--run",
    "run",
    metavar="RECORD",
    help="Show the emulated rows of this run beside their predictions.",
)
@hardware(f"or, with --run, {HERE}: time the run's models")
@autocast
@fp32_precision
@style
@click.option(
    "--out",
    type=PATH,
    metavar="DIR",
    help="Where to put the records of published tables. "
    "Default: results/predicted in a checkout, else predicted.",
)
def predict(
    experiments: list[str],
    run: str | None,
    hardware: Any,
    autocast: str | None,
    fp32_precision: str | None,
    style: str,
    out: Path | None,
) -> None:
    """Predict published tables without running anything.

    EXPERIMENTS, or all, are predicted at scale paper. No GPU is needed.
    """
    from reproduce.predict.rows import predict_run, predict_table
    from reproduce.tables.all import written_records
    from reproduce.tables.emulated import beside_emulated

    if bool(experiments) == (run is not None):
        raise click.UsageError("name either experiments, or a run by --run")
    if run is not None:
        if out is not None:
            raise click.UsageError("--out is for published tables: with --run nothing is written")
        if autocast or fp32_precision:
            raise click.UsageError(
                "--autocast, --fp32-precision: a run is predicted as it was run, in float32"
            )
        emulated = load(find_record(run))
        if not any(result.status == "emulated" for result in emulated.results):
            raise click.UsageError(f"--run {run}: it has no emulated rows")
        found = find_devices(None, None)
        with found.in_use():
            predicted = predict_run(emulated, hardware or found.first(1)[0])
        return click.echo(
            written_records([emulated, predicted], style, beside_emulated(emulated, predicted)),
            nl=False,
        )

    if hardware is None:
        raise click.BadParameter(
            "the papers' tables are predicted from a description: name one. On this machine, python -m reproduce plan "
            f"MODEL --hardware {HERE} times a model, and predict --run RUN --hardware {HERE} those of a run",
            param_hint=f"--hardware {HERE}",
        )
    other = list(filter(None, (autocast and f"autocast-{autocast}", fp32_precision)))
    if other and out is None:
        raise click.UsageError(
            "--autocast, --fp32-precision: name a folder by --out; results/predicted is as published"
        )
    out = out or OUT / "predicted"
    prepare_folder(out)
    records = []
    names = list(predictable()) if ALL in experiments else experiments
    for name in names:
        with precision(fp32_precision, autocast):
            record = predict_table(name, hardware)
        if other:
            record = replace(
                record,
                name="-".join([record.name, *other]),
                title=", ".join([record.title, *other]),
            )
        records.append(record)
        save(record, out / f"{record.name}.json")
    click.echo(written_records(records, style), nl=False)
    click.echo(f"written: {many(len(names), 'record')} to {out}", err=True)


@contextlib.contextmanager
def precision(fp32_precision: str | None, autocast: str | None = None) -> Iterator[None]:
    """Set float32's precision and CUDA autocast where they are given, and restore both at the end."""
    import torch

    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        for kind in kinds if fp32_precision else ():
            kind.fp32_precision = fp32_precision
        if autocast is not None:  # `torch.autocast` would disable itself on a machine without a GPU
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", getattr(torch, autocast))
        yield
    finally:
        for kind, was in zip(kinds, before, strict=True):
            kind.fp32_precision = was
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)


def _shape(text: str) -> tuple[int, ...]:
    """Return the shape of a sample from text such as `3x224x224`."""
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"a sample's shape is written as 3x224x224, without the batch; got {text!r}"
        )
    return tuple(map(int, sizes))


@command("plan unet --size 48 160 --memory 24GiB", "plan torchvision:resnet50 --hardware a100x8")
@click.argument("model", metavar="MODEL")
@click.option("--size", type=(int, int), metavar="N N", help="(L, D) of amoebanet, (B, C) of unet.")
@click.option(
    "--input",
    "shape",
    callback=parsed(_shape),
    metavar="3x224x224",
    help="A sample's, for other models.",
)
@click.option("--devices", type=COUNT, metavar="N", help="Default: as many as the hardware has.")
@click.option("--memory", metavar="24GiB", help="Of each device. Default: the hardware's.")
@click.option(
    "--headroom",
    type=click.FloatRange(min=0),
    metavar="SHARE",
    help="Memory to leave to the allocator, as "
    f"a share of the tensors' bytes. Default: {HEADROOM} on a GPU, 0 on a CPU.",
)
@click.option("--batch-size", type=COUNT, metavar="N", help="Default: the papers', else 128.")
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    metavar="NAME",
    help=f"{', '.join(OPTIMIZERS)}. Default: the papers', else sgd.",
)
@click.option(
    "--schedules", "orders", metavar="NAME,NAME", help="Schedules to choose from. Default: GPipe."
)
@autocast
@click.option("--master-weights", is_flag=True, help="The optimizer keeps a float32 copy.")
@fp32_precision
@hardware(f"or {HERE}: time the layers")
@click.option(
    "--profile",
    "profiled",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"With --hardware {HERE}: time layers with micro-batches of at most N samples; more take longer "
    f"and say more. Default: {PROFILED}.",
)
@style
@click.option(
    "--largest",
    "grows",
    type=click.Choice(["depth", "width"]),
    help="Find the largest model that fits: grow its first or its second size.",
)
def plan(
    model: str,
    size: tuple[int, int] | None,
    shape: tuple[int, ...] | None,
    devices: int | None,
    memory: str | None,
    headroom: float | None,
    batch_size: int | None,
    optimizer: str | None,
    orders: str | None,
    autocast: str | None,
    master_weights: bool,
    fp32_precision: str | None,
    hardware: Any,
    profiled: int | None,
    style: str,
    grows: str | None,
) -> None:
    """Find the best setup for MODEL on a node, by prediction.

    MODEL is amoebanet, unet, resnet101, torchvision:NAME, or package.module:function of your own, which returns the
    model, or the model and a batch.
    """
    import torch

    from reproduce.predict.asked import PAPERS, Asked, find_given, tell_largest
    from reproduce.tables.output import of_plan, written
    from torchgpipe.plan import plan as make_plan
    from torchgpipe.plan.amount import parse_amount

    sized = [name for name, paper in PAPERS.items() if paper.sizes]
    sizes_of = f"only {' and '.join(sized)} have sizes to choose; leave"
    timed = f"nothing is timed with a description; leave it out, or say --hardware {HERE}"
    alone = "the largest model is a question of memory alone, nothing is timed for it: name a description"
    against = {
        "--size": size and model not in sized and f"{sizes_of} --size out",
        "--largest": grows and model not in sized and f"{sizes_of} --largest out",
        "--input": shape
        and model in PAPERS
        and f"{model} has samples of its own; leave --input out",
        "--schedules": grows and orders and "the largest model is found for GPipe; leave it out",
        "--autocast": grows and autocast and IN_FLOAT32,
        "--master-weights": grows and master_weights and IN_FLOAT32,
        f"--format {style}": grows
        and style != "text"
        and "the largest model is told in words; leave it out",
        "--profile": profiled and hardware and timed,
        f"--hardware {HERE}": grows and hardware is None and alone,
    }
    for option, reason in against.items():
        if reason:
            raise click.BadParameter(str(reason), param_hint=option)
    try:
        given = find_given(model, size or (), shape or ())
        batch_size, optimizer = batch_size or given.batch_size, optimizer or given.optimizer
        if grows is None:
            numbers_as = (
                autocast and f"autocast {autocast}",
                fp32_precision,
                "master weights" * master_weights,
            )
            title = ", ".join(
                [given.title, f"batch size {batch_size}", optimizer, *filter(None, numbers_as)]
            )
            found = Devices("meta", devices or 1) if hardware else find_devices(None, None)
            with found.in_use(), precision(fp32_precision):
                module, sample = given.built(
                    min(batch_size, profiled or PROFILED), found.first(1)[0]
                )
                planned = make_plan(
                    module,
                    sample,
                    batch_size=batch_size,
                    devices=devices or (None if hardware else found.count),
                    memory=memory,
                    headroom=headroom,
                    hardware=hardware or HERE,
                    optimizer=optimizer,
                    schedules=(orders or "GPipe").split(","),
                    autocast=None if autocast is None else getattr(torch, autocast),
                    master_weights=master_weights,
                )
            markdown = f"{title}\n\n```\n{planned}\n```\n"
            click.echo(
                written(style, of_plan(planned, title), f"{title}\n\n{planned}\n", markdown),
                nl=False,
            )
        else:
            assert hardware is not None
            tensors = hardware.room(parse_amount(memory) if memory else hardware.memory, headroom)
            paper, count = PAPERS[model], devices or hardware.devices
            asked = Asked(
                paper, size or paper.sizes, batch_size, count, tensors, optimizer, hardware
            )
            tell_largest(asked, ("depth", "width").index(grows), click.echo)
    except (
        TypeError,
        ValueError,
    ) as error:  # a size that the model cannot have, or a plan that is impossible
        raise Error(str(error)) from None


@command("schedule 1F1B -n 4 -m 8", "schedule ZBH1 --svg zbh1.svg")
@click.argument("name", metavar="NAME|FILE")
@click.option("-n", "devices", type=COUNT, help="Devices. Default: 4, or as the file has it.")
@click.option(
    "-m", "micro_batches", type=COUNT, help="Micro-batches. Default: 8, or as the file has it."
)
@click.option("-v", "stages", type=COUNT, help="Stages on each device.")
@click.option(
    "--checkpoint",
    type=click.Choice(["always", "except_last", "never"]),
    metavar="MODE",
    default="never",
    show_default=True,
    help="always, except_last or never.",
)
@click.option("--svg", type=FILE, metavar="FILE", help="Write a picture, too.")
def schedule(
    name: str,
    devices: int | None,
    micro_batches: int | None,
    stages: int | None,
    checkpoint: str,
    svg: Path | None,
) -> None:
    """Draw a schedule: a row is a device, a column a unit of time.

    NAME is GPipe, 1F1B, Interleaved1F1B, ZBH1, ZBH2 or ZBVZeroBubble; FILE a .csv of torch.distributed.pipelining. A
    whole backward takes two units, all else one.
    """
    from torchgpipe.schedules import Schedule, make

    try:
        file = Schedule.load(name) if name.endswith(".csv") else None
        n, m = (
            devices or (len(file.lists) if file else 4),
            micro_batches or (file.micro_batches if file else 8),
        )
        found = make(file or name, n, m, stages, checkpoint)
    except (OSError, ValueError) as error:
        raise Error(str(error)) from None
    played = found.replay()
    click.echo(
        f"{found.name}, n = {n}, m = {m}, {len(found.placement)} stages, checkpoint={checkpoint}\n\n{found}\n"
    )
    click.echo(
        f"bubble: {played.bubble_of_longest:.1%} of the longest device's span, {played.bubble:.1%} of the step"
    )
    click.echo(f"the step takes {played.seconds:g} units")
    click.echo(f"kept at most, tasks by device: {', '.join(map(str, found.in_flight))}")
    if svg is not None:
        if svg.suffix not in ("", ".svg", ".png"):
            raise Error(f"--svg {svg}: a picture is a .svg or a .png")
        from reproduce.records.record import write_atomically
        from reproduce.report.gantt import gantt

        write_atomically(svg, gantt(played, found.name, svg.suffix[1:] or "svg"))
        click.echo(f"written: {shown(svg)}", err=True)
