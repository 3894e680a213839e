"""Show the user where an error was raised: in which layer, micro-batch and stage.

This file adds a note to the error, which Python prints below the message. It also removes the
frames of this library from the traceback.
"""

from types import FrameType

from torch import nn

_IN = "torchgpipe: in "
"""The beginning of a note that says where an error was raised."""

_BETWEEN = {
    "torch.nn.modules.module",
    "torch.nn.modules.container",
    "torch.autograd",
    "torch.autograd.function",
    "torch.autograd.graph",
}
"""The modules of PyTorch through which this library calls layers and their backwards."""


def note(error: BaseException, place: str) -> None:
    """Add to an error a note about where it was raised, unless the error has such a note already.

    If an inner pipeline (a layer that is itself a pipeline) has added a note, that note is more
    exact.

    Args:
        error: The error.
        place: Where the error was raised, such as "stage 1, forward of micro-batch 2".
    """
    # Before Python 3.11 there are no notes.
    if hasattr(error, "add_note") and not place_of(error):
        error.add_note(_IN + place)


def note_rank(error: BaseException, rank: int) -> None:
    """Add to an error a note about this rank, if a note says already where it was raised."""
    if hasattr(error, "add_note") and place_of(error):
        error.add_note(f"torchgpipe: on rank {rank}")


def place_of(error: BaseException) -> str:
    """Return where an error was raised, from the note that `note` has added; "" without a note."""
    for each in getattr(error, "__notes__", ()):
        if each.startswith(_IN):
            return str(each.removeprefix(_IN))
    return ""


def note_task(error: BaseException, doing: str, stage: int, partition: nn.Module) -> None:
    """Add to an error a note about the task, the stage and the layer in which it was raised.

    Args:
        error: The error.
        doing: The task, such as "forward of micro-batch 2".
        stage: The index of the stage.
        partition: The layers of the stage.
    """
    names = {module: name for name, module in partition.named_modules() if name}
    layer = ""
    # Leave out the first frame, which catches the error. Before Python 3.13, reading its `f_locals`
    # would keep its variables alive, and among them the error itself.
    traceback = error.__traceback__ and error.__traceback__.tb_next
    while traceback is not None:
        # Methods of a module have it as `self`. The last such frame is in the innermost module.
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            layer = f"layer {names[module]!r} ({type(module).__name__}) of "
        traceback = traceback.tb_next
    note(error, f"{layer}stage {stage}, {doing}")


def shorten(error: BaseException) -> None:
    """Remove this library's frames from the traceback of an error in a layer or a criterion.

    Errors from other places keep all frames, because they may come from a fault of this library.
    Call this function in an `except` block, before `raise`.
    """
    if not place_of(error).startswith(("layer ", "the criterion")):
        return
    traceback = error.__traceback__
    while traceback is not None and _is_between(traceback.tb_frame):
        traceback = traceback.tb_next
    if traceback is not None:
        error.__traceback__ = traceback


def _is_between(frame: FrameType) -> bool:
    """Return whether a frame's code is in this library, or in PyTorch's code that calls layers."""
    module = str(frame.f_globals.get("__name__"))
    return module in _BETWEEN or module.partition(".")[0] == "torchgpipe"
