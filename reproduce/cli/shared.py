"""Define options that several commands share, and helpers for command line arguments."""

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from reproduce.error import Error, handling, leave, missing, suggestion
from reproduce.machine.description import ROOT
from reproduce.tables.output import FORMATS

T = TypeVar("T")
Option = Callable[[Callable[..., None]], Callable[..., None]]

COUNT = click.IntRange(min=1)
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
HERE = "here"  # the same name as in `torchgpipe.plan.planner`
HARDWARE = sorted(path.stem for path in (ROOT / "torchgpipe" / "plan" / "hardware").glob("*.json"))


class Command(click.Command):
    """A click command that imports torch only after its arguments were found to be valid.

    The import takes seconds. Wrong arguments are reported without this delay.
    """

    def invoke(self, context: click.Context) -> Any:
        """Import torch, and run the command's function."""
        need_torch()
        return super().invoke(context)


def need_torch() -> None:
    """Import torch, or raise `Error` if torch is missing or broken.

    During the import, a signal such as Ctrl-C ends the process at once. The usual handler would
    raise an exception, and code in torch could catch this exception, so that the process goes on.
    """
    if "torch" not in sys.modules:
        with handling(leave):
            problem = missing("torch")
        if problem is not None:
            raise Error(problem)


def _described(name: str) -> Any:
    need_torch()
    from torchgpipe.plan.hardware.hardware import load_hardware

    return load_hardware(name)


on = click.option(
    "--on",
    type=click.Choice(["cpu", "cuda", "meta"]),
    help="Kind of devices. Default: cuda if there is any, else cpu. On meta, memory is counted "
    "without data.",
)


def devices_by_default(default: str) -> Option:
    """Return a click option `--devices` (`-n`), whose help text ends with the argument `default`.

    `default` says how many devices are used if the option is not given.
    """
    return click.option(
        "-n", "--devices", type=COUNT, metavar="N", help=f"Devices. Default: {default}"
    )


devices = devices_by_default("all. A CPU device is a share of the cores.")
seed = click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    metavar="N",
    help="Seed of all that is drawn. Default: 0.",
)
autocast = click.option(
    "--autocast",
    type=click.Choice(["bfloat16", "float16"]),
    metavar="TYPE",
    help="Train under autocast to bfloat16 or float16.",
)
style = click.option(
    "--format",
    "style",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    metavar="FORMAT",
    help=f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}.",
)
fp32_precision = click.option(
    "--fp32-precision",
    type=click.Choice(["ieee", "tf32"]),
    metavar="TYPE",
    help="How GPUs compute float32: ieee or tf32. Default: convolutions in tf32 where the hardware "
    "has it, products in ieee, as PyTorch does.",
)


def examples(*commands: str) -> str:
    """Return the examples at the end of a command's help text, one command on each line."""
    lines = ["\b", "Examples:"]
    lines += [f"  python -m reproduce {command}" for command in commands]
    return "\n".join(lines)


def command(
    *lines: str, cls: type[click.Command] = Command, **how: Any
) -> Callable[..., click.Command]:
    """Return a decorator that turns a function into a click command.

    Args:
        lines: Command lines to show as examples at the end of the command's help text.
        cls: The class of the command.
        how: Further arguments of `click.command`.
    """
    return click.command(cls=cls, epilog=examples(*lines), **how)


class FiniteRange(click.FloatRange):
    """A range of numbers without NaN and infinity, which `click.FloatRange` accepts."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def threshold(default: float) -> Option:
    """Return the click option `--threshold`, the smallest relative difference that matters."""
    return click.option(
        "--threshold",
        type=FiniteRange(min=0),
        metavar="SHARE",
        default=default,
        show_default=True,
        help="Smallest relative difference that matters.",
    )


def alpha(where: str) -> Option:
    """Return the click option `--alpha`: the accepted risk of taking noise for a difference."""
    return click.option(
        "--alpha",
        type=FiniteRange(0, 1, min_open=True, max_open=True),
        metavar="RISK",
        default=0.01,
        show_default=True,
        help=f"Accepted risk of calling noise significant, {where}.",
    )


def hardware(here: str) -> Option:
    """Return the click option `--hardware`, which names a hardware description.

    The option's value can also be "here". Then the command times the layers on this machine.

    Args:
        here: The words that name this value in the option's help text, such as "or here".
    """
    return click.option(
        "--hardware",
        default="p40x8",
        show_default=True,
        metavar="NAME|FILE",
        callback=parsed(lambda name: None if name == HERE else _described(name)),
        help=f"{', '.join(HARDWARE)}, a file, {here}: time layers.",
    )


def parsed(
    parse: Callable[[str], T],
) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Return a callback for a click option that converts the option's text by `parse`.

    If `parse` raises `ValueError`, the callback raises click's error with the same message.
    """

    def callback(_: click.Context, __: click.Parameter, text: str | None) -> T | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


described = parsed(_described)


def known(what: str, offered: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """Return keyword arguments of `click.argument`, for an argument that is a list of names.

    An unknown name raises an error, and repeated names are dropped. A shell can complete the names.

    Args:
        what: What the names stand for, such as "experiment", for the error message.
        offered: A function that returns the known names.
    """

    def callback(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> list[str]:
        for name in names:
            if name not in offered():
                raise click.BadParameter(
                    f"no {what} is called {name!r}; {suggestion(name, offered())}"
                )
        return list(dict.fromkeys(names))

    def complete(_: click.Context, __: click.Parameter, start: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in offered() if name.startswith(start)]

    return {"callback": callback, "shell_complete": complete}


def shown(path: Path) -> str:
    """Return a path for output: relative if the file is in the current folder, else absolute."""
    path = path.absolute()
    here = Path.cwd()
    if path.is_relative_to(here):
        path = path.relative_to(here)
    return str(path)
