"""Check that a saved state fits the model and the optimizer into which it is loaded."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchgpipe.state.optimizers import Content
from torchgpipe.state.saved_files import is_sparse

_NAMED = 5
"""How many keys of a state an error message names at most."""

Forms = dict[str, str]
"""Maps the key of each tensor in a state to a text with the tensor's type and shape."""

Held = tuple[Forms, list[str], dict[str, str]]
"""What a rank has: the types and shapes of its tensors, the classes of its optimizers, and the
class of the optimizer of each optimized parameter."""


def form_of(x: Any) -> str:
    """Return a tensor's dtype and shape as text such as "float32 [2, 3]", to compare tensors.

    `x` can also be the metadata of a saved tensor. For a sparse tensor, or a value that is not a
    tensor, the result is "".
    """
    if isinstance(x, TensorStorageMetadata):
        dtype, shape = x.properties.dtype, x.size
    elif isinstance(x, Tensor) and not is_sparse(x):
        dtype, shape = x.dtype, x.shape
    else:
        return ""
    return f"{dtype} {list(shape)}".removeprefix("torch.")


def check_fits(path: Path, saved: Metadata, training: Content, held: list[Held]) -> None:
    """Raise `ValueError` if a saved state does not fit the model and the optimizers of the ranks.

    Args:
        path: The folder of the saved state, for messages.
        saved: The metadata of the saved state.
        training: A dictionary from the saved state. It has the classes of the optimizers, and the
            optimizer's options for each parameter.
        held: What each rank has: the dtypes and shapes of its tensors, the classes of its
            optimizers, and for each optimized parameter the class of its optimizer.
    """
    there: Forms = {}
    for key, x in saved.state_dict_metadata.items():
        if key.startswith(("model.", "generator.")):
            there[key] = form_of(x)
    here: Forms = {}
    for forms, _, _ in held:
        here |= forms
    kinds: set[str] = set()
    kind_of: dict[str, str] = {}
    for _, own_kinds, own_kind_of in held:
        kinds |= {*own_kinds}
        kind_of |= own_kind_of
    if kinds:
        there |= _trained(training["options"])
        here |= _trained(kind_of)
    wrong = _differences(there, here)
    if wrong:
        raise ValueError(f"the state in {path} belongs to another model: {'; '.join(wrong)}")
    of_saved = training["optimizer"]
    if kinds and sorted(kinds) != of_saved:
        raise ValueError(
            f"the state in {path} was saved with the optimizer {', '.join(of_saved)}, not with "
            f"{', '.join(sorted(kinds))}; load it with an optimizer of the saved class"
        )
    # States of older versions do not have this entry: they have only one class of optimizer.
    saved_kind_of = training.get("kind_of", {})
    for name, kind in kind_of.items():
        saved_kind = saved_kind_of.get(name, kind)
        if kind != saved_kind:
            raise ValueError(
                f"the state in {path} was saved with the optimizer {saved_kind} for {name}, not "
                f"with {kind}; give each parameter an optimizer of the saved class"
            )


def _trained(names: Iterable[str]) -> Forms:
    """Return a dictionary with a key "optimizer of NAME" for each optimized parameter.

    All values are "", because only the keys of two such dictionaries are compared.
    """
    return {f"optimizer of {name}": "" for name in names}


def _differences(there: Forms, here: Forms) -> list[str]:
    """Describe how a saved state (`there`) differs from the state of the ranks (`here`).

    The list has at most three texts for an error message. They name the keys that the saved state
    lacks, the keys that only the saved state has, and the keys whose tensors differ in dtype or
    shape.
    """
    unlike = []
    for key, form in here.items():
        saved = there.get(key, form)
        # A module can return extra state of another size at each call.
        if saved != form and not key.endswith("_extra_state"):
            unlike.append(f"{key} ({saved}, here {form})")
    said = []
    for what, keys in (
        ("it lacks", [key for key in here if key not in there]),
        ("it has besides", [key for key in there if key not in here]),
        ("of another shape or type are", unlike),
    ):
        if keys:
            named = ", ".join(keys[:_NAMED])
            more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
            said.append(f"{what} {named}{more}")
    return said
