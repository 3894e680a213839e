"""Say where an error was raised: by a note, and by a traceback without this library's frames.

Python prints notes below the message of an error.
"""

from types import FrameType

from torch import nn

_IN = "torchgpipe: in "
"""The text that a note with a place begins with."""

_BETWEEN = {
    "torch.nn.modules.module",
    "torch.nn.modules.container",
    "torch.autograd",
    "torch.autograd.function",
    "torch.autograd.graph",
}
"""The modules of PyTorch through which this library calls layers and their backwards."""


def note(error: BaseException, place: str) -> None:
    """Add a note with a place to an error, unless the error already has such a note.

    If an inner pipeline has added a note, its place is more exact than `place`.
    """
    # Before Python 3.11 there are no notes.
    if hasattr(error, "add_note") and not place_of(error):
        error.add_note(_IN + place)


def note_rank(error: BaseException, rank: int) -> None:
    """Add a note with the rank to an error, if the error already has a note with a place."""
    if hasattr(error, "add_note") and place_of(error):
        error.add_note(f"torchgpipe: on rank {rank}")


def place_of(error: BaseException) -> str:
    """Return the place in the note of an error, or an empty text if there is no such note."""
    for each in getattr(error, "__notes__", ()):
        if each.startswith(_IN):
            return str(each.removeprefix(_IN))
    return ""


def note_task(error: BaseException, doing: str, stage: int, partition: nn.Module) -> None:
    """Add a note to an error that says which task, which stage and which layer raised it.

    Args:
        error: The error.
        doing: The task, such as "forward of micro-batch 2".
        stage: The index of the stage.
        partition: The layers of the stage.
    """
    names = {module: name for name, module in partition.named_modules() if name}
    layer = ""
    # Leave out the frame that catches the error. Before Python 3.13, `f_locals` would keep the
    # frame's variables alive, and so the error itself.
    traceback = error.__traceback__ and error.__traceback__.tb_next
    while traceback is not None:
        # Methods of a module have it as `self`. The last such frame is in the innermost module.
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            layer = f"layer {names[module]!r} ({type(module).__name__}) of "
        traceback = traceback.tb_next
    note(error, f"{layer}stage {stage}, {doing}")


def shorten(error: BaseException) -> None:
    """Remove the frames before the layer or the criterion from the traceback of its error.

    An error without a note of a layer or the criterion keeps all frames, because it may be a fault
    of the library. Call this in an `except` block, before `raise`.
    """
    if not place_of(error).startswith(("layer ", "the criterion")):
        return
    traceback = error.__traceback__
    while traceback is not None and _is_between(traceback.tb_frame):
        traceback = traceback.tb_next
    if traceback is not None:
        error.__traceback__ = traceback


def _is_between(frame: FrameType) -> bool:
    """Return whether a frame is of this library, or of PyTorch's code that calls layers."""
    module = str(frame.f_globals.get("__name__"))
    return module in _BETWEEN or module.partition(".")[0] == "torchgpipe"
