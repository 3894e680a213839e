"""Concatenate the outputs of micro-batches.

Section 2.2 of the GPipe paper describes micro-batches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchgpipe.tensors.microbatch import (
    TensorOrTensors,
    form_of,
    is_flat,
    tensors_of,
    together,
)

ONE_AT_A_TIME = (
    "call step(criterion, input, target) or evaluate(...), which give the criterion one "
    "micro-batch at a time"
)
"""What to do if the outputs of micro-batches cannot be concatenated."""


def gather(outputs: list[TensorOrTensors]) -> TensorOrTensors:
    """Concatenate the outputs of all micro-batches along dimension 0: the inverse of `scatter`.

    Raises:
        TypeError: If the outputs are neither tensors nor tuples, or if they differ in their number
            of tensors.
        ValueError: If an output is a scalar, or if outputs differ in more than the batch size.
    """
    if len(outputs) == 1:
        return outputs[0]
    if not is_flat(outputs[0]) or isinstance(outputs[0], PackedSequence):
        raise TypeError(
            f"the last partition returns {type(outputs[0]).__name__}, but a pipeline can only "
            "concatenate a tensor, a tuple of tensors, or a mapping or dataclass with tensors, "
            f"without further nesting; return one of these, or {ONE_AT_A_TIME}"
        )
    expected = _structure(outputs[0])
    for i, y in enumerate(outputs):
        if _structure(y) != expected:
            raise TypeError(
                f"outputs of all micro-batches need the same structure, but micro-batch 0 returned "
                f"{expected} and micro-batch {i} returned {_structure(y)}; return the same "
                "structure for every input"
            )
    columns = list(zip(*map(tensors_of, outputs), strict=True))
    for column in columns:
        if any(y.dim() == 0 for y in column):
            raise ValueError(
                "outputs of micro-batches are concatenated along the batch dimension, but the last "
                "partition returned a scalar; move a loss that reduces the batch out of the "
                "pipeline"
            )
        shapes = {None if y.is_nested else y.shape[1:] for y in column}
        if None in shapes or len(shapes) > 1:
            raise ValueError(
                "outputs of micro-batches are concatenated along the batch dimension, but they "
                f"differ in other dimensions, too; {ONE_AT_A_TIME}"
            )
    _check_second_dimension(columns)
    gathered = tuple([torch.cat(column) for column in columns])
    return together(form_of(outputs[0]), gathered)  # type: ignore[no-any-return]


def _check_second_dimension(columns: Sequence[Sequence[Tensor]]) -> None:
    """Raise `ValueError` if an output has the batch in dimension 1, as the state of an RNN has.

    Args:
        columns: For each output of the last partition, its tensors of all micro-batches.
    """
    samples = len(columns[0][0])
    for column in columns[1:]:
        y = column[0]
        if y.dim() > 1 and y.size(1) == samples and y.size(0) % samples:
            raise ValueError(
                f"an output has shape {tuple(y.shape)} for {samples} samples, but outputs of "
                "micro-batches are concatenated along dimension 0; if the batch is in dimension 1, "
                "as in the state of an RNN, return state.transpose(0, 1), and transpose it back "
                "after the pipeline"
            )


def _structure(y: TensorOrTensors) -> str:
    return "a tensor" if isinstance(y, Tensor) else f"a tuple of {len(y)}"
