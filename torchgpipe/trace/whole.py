"""Decide which submodules are kept whole: recorded as a single call, and not cut into layers.

For example, a submodule is kept whole if it uses something that a recording of its calls cannot
repeat, such as a random state. A note says what the submodule uses, and in which line.
"""

import warnings
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from torchgpipe.caught import shortened
from torchgpipe.tensors._autograd import is_compiled
from torchgpipe.trace.refuse import Untraceable, Where, refused, where

Whole = Module | type[Module]
"""A submodule, or a class of submodules."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# All of PyTorch's own modules are kept whole, except for these containers.
_OPENED = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


def stays_whole(module: Module, whole: Container[Module]) -> bool:
    """Return whether a submodule is kept whole: recorded as one call, and not cut into layers.

    Args:
        module: The submodule.
        whole: The submodules that must be kept whole. PyTorch's own layers, and submodules that are
            compiled, have hooks or have no submodules, are kept whole in any case.
    """
    own = type(module).__module__.startswith("torch.") and not isinstance(module, _OPENED)
    childless = all(child is None for child in module._modules.values())
    return module in whole or own or hooks_of(module) or is_compiled(module) or childless


def hooks_of(module: Module) -> bool:
    """Return whether a module has forward or backward hooks, which run when it is called."""
    return any(vars(module).get(name) for name in HOOKS)


def kept_by_user(module: Module, whole: Iterable[Whole]) -> set[Module]:
    """Return the submodules that a user keeps whole: they are not cut into layers.

    Args:
        module: The module that is cut into layers.
        whole: The argument `whole` of `sequential`: submodules, or classes of submodules.

    Raises:
        TypeError: If `whole` is not a list of modules and classes.
        ValueError: If an element of `whole` matches no submodule of the module.
    """
    what = "whole must be a list of submodules or their classes"
    if isinstance(whole, str | type | Module) or not isinstance(whole, Iterable):
        raise TypeError(f"{what}, but got {shortened(whole)}")
    kept: set[Module] = set()
    for chosen in whole:
        if isinstance(chosen, str):
            raise TypeError(
                "whole must be a list of submodules or their classes, but it contains the string "
                f"{chosen!r}; give the class itself, or module.get_submodule(…) with the name of "
                "a submodule"
            )
        if not isinstance(chosen, type | Module):
            raise TypeError(f"{what}, but has {shortened(chosen)}")
        alike: set[Module] = set()
        for m in module.modules():
            if m is chosen or (isinstance(chosen, type) and isinstance(m, chosen)):
                alike.add(m)
        if not alike:
            kind = chosen if isinstance(chosen, type) else type(chosen)
            raise ValueError(f"{type(module).__name__} has no submodule {kind}")
        kept |= alike
    return kept


Notes = dict[Module, tuple[str, Where]]
"""For each module, the name of something that cannot be recorded, and the line that uses it."""

TRAINING = "training"
"""The note of a module that reads its mode."""
CHECKPOINT = "torch.utils.checkpoint"
"""The note of a module that checkpoints a part of its forward."""
OTHER_RANDOM = "random numbers beside PyTorch's"
"""The note of a module that draws random numbers by Python's or NumPy's functions."""

# Functions that cannot be recorded: they may return something else when the layers run, or they do
# more than return a result. For an attribute such as `x.grad`, the dictionary has the functions
# that Python calls: `__get__` to read the attribute, and `__set__` to set it.
NOTED: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
}
for name in ("requires_grad", "is_leaf", "grad_fn", "grad", "_base"):
    NOTED[getattr(Tensor, name).__get__] = name
for name in ("requires_grad", "grad", "data"):
    NOTED[getattr(Tensor, name).__set__] = name
for name in (
    "is_contiguous",
    "stride",
    "storage_offset",
    "dim_order",
    "_is_view",
    "is_inference",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "backward",
):
    NOTED[getattr(Tensor, name)] = name


def add_note(notes: Notes, module: Module, what: str) -> None:
    """Note that a module uses `what`, which a recording cannot repeat, in the line that runs now.

    A module keeps its first note. But a note that the module reads its mode (`training`) is
    replaced by a later note, because a module that only reads its mode can be recorded.

    Args:
        notes: The notes of all modules.
        module: The module.
        what: The name of what it uses.
    """
    known = notes.get(module)
    if known is None or known[0] == TRAINING:
        notes[module] = (what, where())


def refuse_own_checkpointing(root: Module) -> None:
    """Raise `Untraceable` if gradient checkpointing of Hugging Face is enabled in a module."""
    for part in root.modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            raise Untraceable(
                f"the module {type(root).__name__} has gradient checkpointing of its own, which a "
                "recording cannot repeat; call module.gradient_checkpointing_disable(), because "
                "the pipeline does its own checkpointing: GPipe(…, checkpoint='always')"
            )


def check_notes(root: Module, notes: Notes) -> None:
    """Raise `Untraceable` if a module uses something that a recording of its calls cannot repeat.

    Reading the mode (`training`) raises no error, because the calls are recorded again when the
    mode changes.

    Args:
        root: The module.
        notes: For each submodule that uses something of this kind: the name of what it uses, and
            the line of code.
    """
    for what, at in notes.values():
        if what != TRAINING:
            if what == CHECKPOINT:
                why = f"it calls {what}, which a recording cannot repeat"
                raise refused(
                    root,
                    at,
                    why,
                    "leave out this call, because the pipeline does its own checkpointing: "
                    "GPipe(…, checkpoint='always'); or call it in a small submodule, and keep this "
                    "submodule as one layer: sequential(…, whole=[ItsClass])",
                ) from None
            why = (
                f"it sets or asks for {what}, which cannot be recorded: it may be different, or "
                "have no effect, when the layers run"
            )
            advice = "do that in a submodule, which is then kept whole, as one layer"
            if what == OTHER_RANDOM:
                advice += (
                    ", and draw there by PyTorch, such as torch.rand(()) < 0.5: a recomputation "
                    "repeats only PyTorch's random numbers"
                )
            raise refused(root, at, why, advice) from None


def small_modules(notes: Notes, root: Module) -> set[Module]:
    """Return the submodules that cannot be cut into layers and are small enough to stay whole.

    A submodule is small enough if it has at most half of the parameters of the whole module.

    Args:
        notes: The submodules that cannot be cut, and why.
        root: The module.

    Raises:
        Untraceable: If a submodule that cannot be cut is too large, and none is small enough.
    """
    total = sum(map(Tensor.numel, root.parameters()))
    small: set[Module] = set()
    for m in notes:
        size = sum(map(Tensor.numel, m.parameters()))
        if m is not root and 2 * size <= total:
            small.add(m)
    if not small:
        check_notes(root, notes)
    return small


def warn_of_own_modes(module: Module, layers: Module) -> None:
    """Warn if a part of a module that was cut into layers has its own method `train` or `eval`.

    Such a method sets, for example, frozen batch norms to evaluation mode again. The layers have
    only the submodules that were not cut, so `layers.train()` does not call it. (There is no
    warning of the method that all models of Hugging Face have, because it only chooses kernels.)
    """
    not_cut = {*layers.modules()}
    for part in module.modules():
        kept = part in not_cut or type(part).train.__module__.startswith("transformers.")
        own = type(part).train is not Module.train or type(part).eval is not Module.eval
        if own and not kept:
            kind = type(part).__name__
            warnings.warn(
                f"{kind} has its own method train() or eval(), which a pipeline does not call, "
                f"because {kind} is cut into layers; after each model.train() or model.eval(), "
                "call the same method of the module itself, whose submodules the pipeline shares",
                stacklevel=4,
            )
            return
