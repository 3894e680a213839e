"""Hold the options that several commands share, and helpers for their paths and names."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import click
import torch

from reproduce.experiments.choose import suggestion
from torchgpipe.plan.hardware.hardware import hardware_names, load_hardware
from torchgpipe.plan.planner import HERE

T = TypeVar("T")
Option = Callable[[Callable[..., None]], Callable[..., None]]

COUNT = click.IntRange(min=1)
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)


on = click.option("--on", type=click.Choice(["cpu", "cuda", "meta"]), help="Kind of devices. Default: cuda if there is "
                  "any, else cpu. On meta, memory is counted without data.")  # fmt: skip
devices = click.option("--devices", type=COUNT, metavar="N", help="Default: all. A CPU device is a share of the cores.")
style = click.option("--format", "style", type=click.Choice(["text", "markdown", "csv", "json"]), default="text",
                     show_default=True, metavar="FORMAT", help="text, markdown, csv or json.")  # fmt: skip
autocast = click.option("--autocast", type=click.Choice(["bfloat16", "float16"]), metavar="TYPE", help="Train under "
                        "autocast to bfloat16 or float16.")  # fmt: skip
fp32_precision = click.option("--fp32-precision", type=click.Choice(["ieee", "tf32"]), metavar="TYPE", help="How GPUs "
                              "compute float32: ieee or tf32. Default: convolutions in tf32 where the hardware has it, "
                              "products in ieee, as PyTorch does.")  # fmt: skip


def examples(*commands: str) -> str:
    """Return the end of a command's help: commands to copy, a line each."""
    return "\n".join(["\b", "Examples:", *(f"  python -m reproduce {command}" for command in commands)])


def threshold(default: float) -> Option:
    """Return the option `--threshold`."""
    return click.option("--threshold", type=click.FloatRange(min=0), metavar="SHARE", default=default,
                        show_default=True, help="Smallest relative difference that matters.")  # fmt: skip


def alpha(where: str) -> Option:
    """Return the option `--alpha`."""
    return click.option("--alpha", type=click.FloatRange(0, 1, min_open=True, max_open=True), metavar="RISK",
                        default=0.01, show_default=True,
                        help=f"Accepted risk of calling noise significant, {where}.")  # fmt: skip


def hardware(here: str) -> Option:
    """Return the option `--hardware`. `here` is the part of its help about timing on this machine."""
    return click.option("--hardware", default="p40x8", show_default=True, metavar="NAME|FILE",
                        callback=parsed(lambda name: None if name == HERE else load_hardware(name)),
                        help=f"{', '.join(hardware_names())}, a file (.json), {here} on this machine.")  # fmt: skip


def parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Return a callback that parses an option's text. A `ValueError` of `parse` becomes click's error message."""

    def callback(_: click.Context, __: click.Parameter, text: str | None) -> T | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def known(what: str, offered: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Return a callback that refuses names which are not offered, and drops repeated ones."""

    def callback(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> list[str]:
        for name in names:
            if name not in offered():
                raise click.BadParameter(f"no {what} is called {name!r}; {suggestion(name, offered())}")
        return list(dict.fromkeys(names))

    return callback


@contextlib.contextmanager
def precision(fp32_precision: str | None, autocast: str | None = None) -> Iterator[None]:
    """Set float32's precision and CUDA autocast where they are given, and restore both at the end."""
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


def shown(path: Path) -> str:
    """Return the path relative to the current folder if it lies below it, else the absolute path."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
