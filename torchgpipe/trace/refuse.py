"""The error for a module that `sequential` cannot cut into layers, and the parts of its message.

The message says which line of the module is the cause, why, and what to do.
"""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from traceback import walk_stack, walk_tb

import torch
from torch import nn

Where = tuple[str, int]
"""A file and a line."""


WITHOUT_CACHE = (
    "turn the cache off before the call of sequential (for a model of Hugging Face, "
    "module.config.use_cache = False; for one whose decoder has a config of its own, such as T5, "
    "module.decoder.config.use_cache = False); to generate text with a cache, call the module "
    "itself, which shares its parameters with the layers of this process"
)
"""What to do if a module keeps keys and values of earlier tokens in a cache."""


_OWN_LOSS = (
    "leave {0} out of the sample, and call model.step(criterion, input, {0}, weight=count): "
    "criterion(output, {0}) is the module's own loss, and count({0}) is how many entries it "
    "counts"
)
_OF_DECODERS = (
    "for Hugging Face's models that predict the next token, criterion = lambda output, {0}: "
    "module.loss_function(output['logits'], {0}, module.config.vocab_size), and count = "
    "lambda {0}: ({0}[:, 1:] != -100).sum()"
)
_OF_ENCODER_DECODERS = (
    "for Hugging Face's encoder-decoders, put decoder_input_ids = "
    "module.prepare_decoder_input_ids_from_labels({0}) into the sample and the input, and give "
    "criterion = lambda output, {0}: torch.nn.functional.cross_entropy("
    "output['logits'].flatten(0, 1), {0}.flatten()), and count = lambda {0}: ({0} != -100).sum()"
)
"""The labels of an encoder-decoder are not shifted: the decoder's inputs are shifted instead."""


class Untraceable(TypeError):
    """The error for a module that `sequential` cannot cut into layers.

    The message says which line of the module is the cause, why, and what to do.
    """


def refused(root: nn.Module, at: Where | None, why: str, what: str) -> Untraceable:
    """Make the error for a module that `sequential` cannot cut into layers.

    Args:
        root: The module.
        at: The file and line of the module that are the cause, or `None` if it is no single line.
        why: The reason.
        what: What the user can do.
    """
    place = ""
    if at is not None and at[0]:
        file, line = at
        place = f" at {file}:{line} (`{linecache.getline(file, line).strip()}`)"
    return Untraceable(f"{type(root).__name__} cannot be traced{place}: {why}; {what}")


def reason(error: BaseException) -> str:
    """Describe an error in one line: the name of its class, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextmanager
def advising_a_tuple(module: nn.Module, sample: object) -> Iterator[None]:
    """Advise the user to give a tuple if the module fails because the sample is a list.

    Raises:
        Untraceable: If the sample is a list, and the module raises an `AttributeError` or a
            `TypeError` whose message has the word "list".
    """
    try:
        yield
    except (AttributeError, TypeError) as error:
        why = reason(error.__cause__ or error)
        if not isinstance(sample, list) or "list" not in why:
            raise
        raise Untraceable(
            f"the sample is a list, which is one argument of {type(module).__name__} ({why}); "
            "give a tuple of its arguments"
        ) from error


def class_of(module: nn.Module, root: nn.Module) -> str:
    """Return Python code that names the class of a submodule, for use in an error message.

    The user can write this code in the argument `whole` of `sequential`. Usually, it is the name of
    the class. If two classes have this name, the code finds the class by the submodule's path.

    Args:
        module: The submodule.
        root: The module that it is in.
    """
    kind = type(module)
    alike = {getattr(nn, kind.__name__, kind)}
    path = ""
    for name, part in root.named_modules():
        if part is module:
            path = name
        if type(part).__name__ == kind.__name__:
            alike.add(type(part))
    if alike == {kind} or not path:
        return kind.__name__
    return f"type(module.get_submodule({path!r}))"


def where(error: BaseException | None = None) -> Where:
    """Return the file and line of the user's code that is running, or that has raised an error.

    It is the innermost line that is neither in PyTorch nor in this library.

    Args:
        error: If it is given, its traceback is searched first, and then the current call stack.
    """
    traceback = error.__traceback__ if error else None
    raised = reversed(list(walk_tb(traceback)))
    running = walk_stack(sys._getframe(1))  # not this frame, which keeps the error alive
    for frame, line in chain(raised, running):
        file = frame.f_code.co_filename
        if not _ours(file):
            return file, line
    return "", 0


_FOLDERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")


def _ours(file: str) -> bool:
    if file.startswith(_FOLDERS):
        return True
    return file.startswith("<") or file.endswith(("/contextlib.py", "/copy.py"))


def own_loss(module: nn.Module, labels: str) -> str:
    """Return what to do about a module that computes its own loss.

    Args:
        module: The module.
        labels: The name of the argument that has the labels.
    """
    advice = [_OWN_LOSS]
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        advice.append(_OF_DECODERS)
    elif hasattr(module, "prepare_decoder_input_ids_from_labels"):
        advice.append(_OF_ENCODER_DECODERS)
    return "; ".join(advice).format(labels)
