"""Refuse a module, with the line of its code, the reason, and what to do."""

import linecache
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn


class Untraceable(TypeError):
    """Tell which line of a module cannot become part of a sequence of layers, why, and what to do."""


def refused(root: nn.Module, at: tuple[str, int], why: str, what: str) -> str:
    """Return the message of a refusal: where, why, and what to do."""
    file, line = at
    text = linecache.getline(file, line).strip()
    return f"{type(root).__name__} cannot be traced at {file}:{line}: `{text}`\n  {why}\n  {what}"


def where() -> tuple[str, int]:
    """Return the file and line of the innermost code that runs and is neither PyTorch's nor this library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _ours(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def line_of(error: BaseException) -> tuple[str, int]:
    """Return the file and line of the innermost such code that an error went through."""
    traceback, found = error.__traceback__, where()
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        found = found if _ours(file) else (file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


_FOLDERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")


def _ours(file: str) -> bool:
    return file.startswith(_FOLDERS) or file.endswith(("/contextlib.py", "/copy.py")) or file.startswith("<")
