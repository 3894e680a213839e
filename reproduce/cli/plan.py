"""Define the command `plan`.

It predicts the best setup to train a model on a node, or the largest model that fits in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from textwrap import fill
from typing import Any

import click
from click.core import ParameterSource

from reproduce.cli.shared import (
    COUNT,
    HARDWARE,
    HERE,
    FiniteRange,
    autocast,
    command,
    devices_by_default,
    fp32_precision,
    hardware,
    parsed,
    style,
)
from reproduce.error import Error
from reproduce.machine.devices import Devices, find_devices

# The planner's optimizers.
OPTIMIZERS = ("none", "sgd", "momentum", "rmsprop", "adagrad", "adam", "adamw")
# The default of the option --headroom.
HEADROOM = 0.15
# What the two numbers of the option --size mean.
GROWS = ("depth", "width")

PROFILED = 4  # default number of samples in the largest micro-batch for timing layers


@contextmanager
def precision(fp32_precision: str | None, autocast: str | None = None) -> Iterator[None]:
    """Within a `with` block, set how GPUs compute float32, and the dtype of CUDA autocast.

    Args:
        fp32_precision: "ieee" or "tf32", or None to keep the current setting.
        autocast: "bfloat16" or "float16", or None to keep the current setting.
    """
    import torch

    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    enabled = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda")
    try:
        if fp32_precision is not None:
            for kind in kinds:
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


@contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints, within a `with` block, what the command is doing.

    The function writes to standard error. On a terminal, each text replaces the previous one at
    once. If the output is not a terminal, a line is written only every few seconds.
    """
    from reproduce.run.progress import Progress

    progress = Progress()
    progress.show_later()
    try:
        yield progress.show
    finally:
        progress.clear()


def _shape(text: str) -> tuple[int, ...]:
    """Return the shape of a sample, parsed from a text such as `3x224x224`."""
    shape = []
    for size in text.split("x"):
        if not size.isdecimal() or int(size) == 0:
            raise ValueError(
                f"a sample's shape is written as 3x224x224, without a batch size; got {text!r}"
            )
        shape.append(int(size))
    return tuple(shape)


@command("plan unet --size 48 160 --memory 24GiB", "plan torchvision:resnet50 --hardware a100x8")
@click.argument("model", metavar="MODEL")
@click.option("--size", type=(int, int), metavar="N N", help="(L, D) of amoebanet, (B, C) of unet.")
@click.option(
    "--input",
    "shape",
    callback=parsed(_shape),
    metavar="3x224x224",
    help="Shape of a sample, without the batch size; not for the papers' models.",
)
@devices_by_default("as many as the hardware has.")
@click.option("--memory", metavar="24GiB", help="Memory of each device. Default: the hardware's.")
@click.option(
    "--headroom",
    type=FiniteRange(min=0),
    metavar="SHARE",
    help="Memory to leave to the allocator, as a share of the tensors' bytes. Default: "
    f"{HEADROOM} on a GPU, 0 on a CPU.",
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
@hardware(f"or {HERE}")
@click.option(
    "--profile",
    "profiled",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"With --hardware {HERE}: time layers with micro-batches of at most N samples (at least "
    f"4); more take longer and say more. Default: {PROFILED}.",
)
@style
@click.option(
    "--largest",
    "grows",
    metavar="SIZE",
    help=f"Find the largest model that fits: grow its {' or '.join(GROWS)}, or an argument of your "
    "function, which has a whole number as its default.",
)
def plan(**options: Any) -> None:
    """Predict the best setup to train MODEL on a node.

    MODEL is amoebanet, unet, resnet101, torchvision:NAME, or your own function, written as
    package.module:function. The function returns a model; or a model and an example batch; or a
    model, an example batch, a criterion and a target, so that the plan includes the loss.
    """
    source = click.get_current_context().get_parameter_source("hardware")
    asked = Options(**options, by_default=source is ParameterSource.DEFAULT)
    conflict = next(conflicts(asked), None)
    if conflict is not None:
        option, reason = conflict
        raise click.BadParameter(reason, param_hint=option)
    try:
        if asked.grows is None:
            show_best(asked)
        else:
            show_largest(asked)
    # The model cannot have this size, or no plan is possible.
    except (TypeError, ValueError) as error:
        raise Error(str(error)) from None


@dataclass(frozen=True)
class Options:
    """The values of the command's parameters."""

    model: str
    size: tuple[int, int] | None
    shape: tuple[int, ...] | None
    devices: int | None
    memory: str | None
    headroom: float | None
    batch_size: int | None
    optimizer: str | None
    orders: str | None
    autocast: str | None
    master_weights: bool
    fp32_precision: str | None
    hardware: Any
    profiled: int | None
    style: str
    grows: str | None
    by_default: bool = False
    """Whether the hardware is the default, because none was given."""

    @property
    def schedules(self) -> list[str]:
        """The names of the schedules to choose from."""
        return (self.orders or "GPipe").split(",")

    @property
    def autocast_dtype(self) -> Any:
        """The dtype of autocast, or `None` without autocast."""
        import torch

        return None if self.autocast is None else getattr(torch, self.autocast)

    @property
    def note(self) -> str:
        """What is assumed about the hardware, as text for the user; empty if nothing is assumed."""
        notes = []
        if self.by_default:
            here = "" if self.grows else f"{HERE}, which times the layers on this machine, or "
            notes.append(
                f"No hardware was given, so {self.hardware.name} is assumed. Name yours by "
                f"--hardware: {here}a description: {', '.join(HARDWARE)}, or a file."
            )
        described = self.hardware.devices if self.hardware else 0
        # The largest model is a question of memory alone, and links do not matter for it.
        if not self.grows and self.devices and self.devices > described > 1:
            notes.append(
                f"{self.hardware.name} describes {described} devices. All {self.devices} devices "
                "are assumed to be connected as fast as these."
            )
        return " ".join(notes)


def conflicts(asked: Options) -> Iterator[tuple[str, str]]:
    """Yield each option that does not fit the model or another option, with the reason."""
    from reproduce.predict.asked import PAPERS

    sized = [name for name, paper in PAPERS.items() if paper.sizes]
    if asked.size and asked.model not in sized:
        yield "--size", f"only {' and '.join(sized)} have sizes to choose; leave --size out"
    if asked.shape and asked.model in PAPERS:
        yield "--input", f"{asked.model} has samples of its own; leave --input out"
    if asked.grows:
        yield from conflicts_with_largest(asked, sized)
    if asked.profiled and asked.hardware:
        yield (
            "--profile",
            f"nothing is timed with a description; leave it out, or say --hardware {HERE}",
        )


def conflicts_with_largest(asked: Options, sized: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option that is wrong in a command line with `--largest`, with the reason.

    Args:
        asked: The values of the options.
        sized: The names of the papers' models whose size the user can choose.
    """
    own = ":" in asked.model and not asked.model.startswith("torchvision:")
    if asked.model in sized and asked.grows not in GROWS:
        yield "--largest", f"{asked.model} grows in {' or '.join(GROWS)}; got {asked.grows!r}"
    elif asked.model not in sized and not own:
        models = f"{', '.join(sized)} and your own functions"
        yield "--largest", f"only {models} have sizes to choose; leave --largest out"
    if asked.hardware is None:
        yield (
            f"--hardware {HERE}",
            "the largest model is a question of memory alone, nothing is timed for it: name a "
            "description",
        )


def show_best(asked: Options) -> None:
    """Find the best setup, and print it."""
    from reproduce.predict.asked import find_given
    from reproduce.tables.output import of_plan, written
    from torchgpipe.plan import plan as make_plan

    given = find_given(asked.model, asked.size or (), asked.shape or ())
    batch_size = asked.batch_size or given.batch_size
    optimizer = asked.optimizer or given.optimizer
    devices = asked.devices
    if asked.hardware:
        found = Devices("meta", devices or 1)
    else:
        found = find_devices(None, None)
        devices = devices or found.count
    largest = min(batch_size, asked.profiled or PROFILED)  # micro-batch to profile layers with
    with found.in_use(), precision(asked.fp32_precision), shown_progress() as progress:
        progress("building the model")
        module, built = given.built(largest, found.first(1)[0])
        planned = make_plan(
            module,
            built.sample,
            batch_size=batch_size,
            devices=devices,
            memory=asked.memory,
            headroom=asked.headroom,
            hardware=asked.hardware or HERE,
            optimizer=optimizer,
            schedules=asked.schedules,
            autocast=asked.autocast_dtype,
            master_weights=asked.master_weights,
            criterion=built.criterion,
            target=built.target,
            progress=progress,
        )
    where = f"on {planned.hardware.name}"
    how = [f"batch size {batch_size}", optimizer, planned.precision]
    title = ", ".join([given.title, *how, where])
    text = f"{headed(title, asked.note)}{planned}\n"
    markdown = f"{headed(title, asked.note, wrap=False)}```\n{planned}\n```\n"
    click.echo(written(asked.style, of_plan(planned, title), text, markdown), nl=False)


def headed(title: str, note: str, *, wrap: bool = True) -> str:
    """Return a title and a note as two paragraphs, which are printed above the results.

    An empty note is left out. If `wrap` is true, long lines are broken.
    """
    from reproduce.tables.layout import WIDTH

    paragraphs = list(filter(None, (title, note)))
    if wrap:
        paragraphs = [fill(text, WIDTH) for text in paragraphs]
    return "".join([f"{text}\n\n" for text in paragraphs])


def show_largest(asked: Options) -> None:
    """Find the largest model that fits in the devices' memory, and print its sizes."""
    from reproduce.predict.asked import PAPERS, find_family, find_given
    from reproduce.predict.largest import Asked, find_largest, lines_of, title_of
    from reproduce.tables.layout import bullets
    from reproduce.tables.output import of_largest, written
    from torchgpipe.plan.hardware.amount import parse_amount
    from torchgpipe.schedules import make

    hardware = asked.hardware
    assert hardware is not None and asked.grows is not None
    given = find_given(asked.model, asked.size or (), asked.shape or ())
    if asked.model in PAPERS:
        family = PAPERS[asked.model].family
        axis = GROWS.index(asked.grows)
    else:
        family = find_family(asked.model, asked.grows, asked.shape or ())
        axis = 0
    memory = parse_amount(asked.memory) if asked.memory else hardware.memory
    question = Asked(
        family,
        asked.size or family.sizes,
        asked.batch_size or given.batch_size,
        asked.devices or hardware.devices,
        hardware.room(memory, asked.headroom),
        asked.optimizer or given.optimizer,
        hardware,
        [make(name, 1, 1).name for name in asked.schedules],
        asked.autocast_dtype,
        asked.master_weights,
    )
    with precision(asked.fp32_precision, asked.autocast):
        title = title_of(question)
        found = find_largest(question, axis, partial(click.echo, err=True))
    lines = list(lines_of(question, axis, found))
    text = f"{headed(title, asked.note)}{bullets(lines)}\n"
    markdown = f"{headed(title, asked.note, wrap=False)}{bullets(lines, wrap=False)}\n"
    click.echo(written(asked.style, of_largest(found, title), text, markdown), nl=False)
