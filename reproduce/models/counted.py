"""Make the inputs for predictions by `torchgpipe.plan`.

These inputs are counts (the operations and bytes of a model's layers), and setups (the balance, the
number of micro-batches and other settings of a training).
"""

import functools
from typing import Any

import torch

from reproduce.models.built import SizedModel
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.plan.count.known import Alike
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.trace.sequential import flat

ALIKE = Alike()  # a cache of counted layers: models of one family have many equal layers


def counted(model: SizedModel) -> Counts:
    """Count the operations and bytes of a model's layers.

    The result depends on PyTorch's current settings: CUDA autocast, and the precision of float32.
    """
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    precisions = [kind.fp32_precision for kind in kinds]
    return _counted(model, autocast, *precisions)


@functools.cache
def _counted(model: SizedModel, *settings: object) -> Counts:
    """Count the operations and bytes of a model's layers, or return them from the cache.

    `settings` has all settings of PyTorch that change the result. The function does not use them,
    but the cache has a separate result for each combination of settings.
    """
    with torch.device("meta"):
        module = model.layers()
    x, _ = model.batch(1, device="meta")
    return count(module, flat(module, x), alike=ALIKE)


def setup_of(config: dict[str, Any], layers: int, *, zeroed: bool = False) -> Setup:
    """Return the setup (balance, micro-batches, optimizer and so on) of a row (configuration).

    A row without a pipeline has one partition and one micro-batch.

    Args:
        config: The row's settings, as its field `config` in a record (a file of results) has them.
        layers: The number of layers of the model.
        zeroed: Whether `zero_grad` fills gradients with zeros instead of freeing them, as PyTorch
            did when the papers were written.
    """
    components = config.get("components")
    name = config["optimizer"].lower()
    if name == "sgd" and config.get("momentum"):
        name = "momentum"
    return Setup(
        batch_size=config["batch_size"],
        balance=tuple(config["balance"] or (layers,)),
        chunks=config["chunks"] or 1,
        checkpoint=config["checkpoint"] or "never",
        # When the papers were written, PyTorch had no foreach optimizers. It updated the parameters
        # one after another, also on GPUs.
        optimizer=optimizer_named(name, foreach=False),
        portals=components is None or "portals" in components,
        streams=components is None or "streams" in components,
        zeroed=zeroed,
    )
