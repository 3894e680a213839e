"""Let layers run on a single sample where the module makes other calls for a single sample.

For example, a module may expand a tensor only if there are several samples. The layers, whose calls
were recorded for several samples, then still compute the same as the module. A comparison of their
results shows whether they do.
"""

from typing import Any

from torch import Tensor
from torch.nn import Module

from torchgpipe.trace.compare import check_outputs, is_on_meta, ran
from torchgpipe.trace.layer import Layers
from torchgpipe.trace.signature import Signature, Tensors


def check_one_sample(module: Module, layers: Layers, signature: Signature, inputs: Tensors) -> None:
    """Find out whether the layers of a module may run on a single sample.

    They may if the module makes the same calls for it as for several samples, or if the layers'
    outputs and gradients are the same as the module's. Otherwise, they refuse a single sample.

    Args:
        module: The module.
        layers: The layers that were made of the module.
        signature: The module's signature, which says which inputs have a batch dimension.
        inputs: The tensors of the sample.
    """
    if is_on_meta(module, inputs):
        return
    one: list[Tensor] = []
    for x, batched in zip(inputs, signature.batched, strict=True):
        first = x.detach()[:1] if batched else x.detach()
        one.append(first.requires_grad_(x.requires_grad))
    sizes: Any = layers[0].sizes
    if not sizes.keep_one_sample(one):
        return
    try:
        expected = ran(module, module, signature, one)
        check_outputs(module, ran(module, layers, signature, one), expected)
    except Exception:
        sizes.forget_one_sample()
