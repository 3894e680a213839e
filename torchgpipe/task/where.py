"""Add a note to an error that says where it was raised. Python prints notes below the message."""

from torch import nn


def note(error: BaseException, place: str) -> None:
    """Add a note with a place to an error, unless the error already has a note.

    If an inner pipeline has added a note, its place is more exact than `place`.
    """
    # Before Python 3.11 there are no notes.
    if hasattr(error, "add_note") and not getattr(error, "__notes__", None):
        error.add_note(f"torchgpipe: in {place}")


def note_rank(error: BaseException, rank: int) -> None:
    """Add a note with the rank to an error, if the error already has a note with a place."""
    if hasattr(error, "add_note") and getattr(error, "__notes__", None):
        error.add_note(f"torchgpipe: on rank {rank}")


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
    traceback = error.__traceback__
    while traceback is not None:
        # Methods of a module have it as `self`. The last such frame is in the innermost module.
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            layer = f"layer {names[module]!r} ({type(module).__name__}) of "
        traceback = traceback.tb_next
    note(error, f"{layer}stage {stage}, {doing}")
