"""Where an error was raised: a note on it, which Python prints below its message."""

from torch import nn


def note(error: BaseException, place: str) -> None:
    """Note a place on an error, unless it has one already, as of an inner pipeline."""
    # Before Python 3.11 there are no notes.
    if hasattr(error, "add_note") and not getattr(error, "__notes__", None):
        error.add_note(f"torchgpipe: in {place}")


def note_rank(error: BaseException, rank: int) -> None:
    """Note the rank on an error that has the place of a task."""
    if hasattr(error, "add_note") and getattr(error, "__notes__", None):
        error.add_note(f"torchgpipe: on rank {rank}")


def note_task(error: BaseException, doing: str, stage: int, partition: nn.Module) -> None:
    """Note on an error what was done, on which stage, and in which layer.

    Args:
        error: The error.
        doing: What was done, such as "forward of micro-batch 2".
        stage: The index of the stage.
        partition: Its layers.
    """
    names = {module: name for name, module in partition.named_modules() if name}
    layer = ""
    traceback = error.__traceback__
    while traceback is not None:
        # A method of a module has it as `self`; the last one of the traceback is the innermost.
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            layer = f"layer {names[module]!r} ({type(module).__name__}) of "
        traceback = traceback.tb_next
    note(error, f"{layer}stage {stage}, {doing}")
