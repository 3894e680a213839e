"""Refuse a module, with the line of its code, the reason, and what to do."""

import linecache
import sys
from itertools import chain
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType

import torch
from torch import nn


class Untraceable(TypeError):
    """Tell which line of a module cannot become part of a sequence of layers, why, and what to do."""


def refused(root: nn.Module, at: tuple[str, int], why: str, what: str) -> Untraceable:
    """Return the error that says which line of a module is refused, why, and what to do."""
    file, line = at
    text = linecache.getline(file, line).strip()
    return Untraceable(
        f"{type(root).__name__} cannot be traced at {file}:{line}: `{text}`\n  {why}\n  {what}"
    )


def where(error: BaseException | None = None) -> tuple[str, int]:
    """Return the file and line of the innermost code that is neither PyTorch's nor this library's.

    Of the code that runs, and before that, of what an `error` went through.
    """
    # Not from this frame on, which would keep the error.
    frames = chain(
        reversed([*walk_tb(error.__traceback__ if error else None)]), walk_stack(sys._getframe(1))
    )
    return next(
        ((frame.f_code.co_filename, line) for frame, line in frames if not _ours(frame)), ("", 0)
    )


_FOLDERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")


def _ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return (
        file.startswith(_FOLDERS)
        or file.endswith(("/contextlib.py", "/copy.py"))
        or file.startswith("<")
    )
