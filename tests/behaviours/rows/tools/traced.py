"""Test cases with pipelines of traced modules.

Some cases compile the layers. In others, the lengths of the texts differ between batches.
"""

from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from examples.works_with import Batches, train
from torchgpipe import sequential
from torchgpipe.layers.compiled import compile_layer

from ....library.trace.texts import GPT, SHAPES, WORDS, text
from ....plain import Plain
from ...compare import REORDERED
from .rows import tool
from .training import backend, graphs


def compile_and_train(run: Any, batches: Batches) -> Any:
    """Compile the layers and train. Fail if a layer reaches PyTorch's limit of recompilations."""
    graphs.clear()
    torch.compiler.reset()
    if isinstance(run, Plain):
        for layer in run.children():
            compile_layer(layer, backend=backend)
    else:
        run.compile(backend=backend)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        losses = train(run, batches)
    assert graphs
    return losses


def language_model() -> nn.Sequential:
    return sequential(GPT(blocks=1), text(2, 8), dynamic_shapes=SHAPES)


def texts() -> list[tuple[Tensor, Tensor]]:
    """Return two mini-batches, whose texts have 8 words in the first and 5 in the second."""
    return [(text(6, length), torch.randn(6, length, WORDS)) for length in (8, 5)]


LENGTHS: dict[str, Any] = {"layers": language_model, "given": texts, "balance": None, "chunks": 3}

ROWS = [
    tool(
        "`model.compile()`",
        compile_and_train,
        "Each layer is compiled as often as without a pipeline. With checkpointing, it is compiled "
        "once more, for first passes, which need no autograd graph.",
    ),
    tool(
        "lengths that change",
        note="Name the lengths that change in `sequential(…, dynamic_shapes=…)`. Then one "
        "pipeline takes mini-batches of all lengths.",
        tolerance=REORDERED,
        **LENGTHS,
    ),
    tool(
        "lengths that change, and `model.compile()`",
        compile_and_train,
        "PyTorch compiles a layer for the first length, and once more when the length changes. "
        "This second code runs for all other lengths.",
        tolerance=REORDERED,
        **LENGTHS,
    ),
]
