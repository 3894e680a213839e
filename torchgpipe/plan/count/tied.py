"""Count tied weights, which are parameters that several layers share, only once.

In many language models, for example, the embedding and the last linear layer share one weight. If
both layers are on one device, the device has this parameter once. If the layers are on two devices,
each of the devices has a copy of the parameter, with a gradient and an optimizer state. This is so
over ranks. In one process, only one of the devices has the optimizer state, so the prediction is
too high for the others.
"""

from collections.abc import Sequence

from torch.nn import Parameter, Sequential

from torchgpipe.plan.count.footprint import LayerCount, Tied


def tied_parameters(module: Sequential) -> list[tuple[Tied, ...]]:
    """Return for each layer a tuple of the parameters that it shares with other layers."""
    holders: dict[Parameter, list[int]] = {}
    for index, layer in enumerate(module):
        for parameter in layer.parameters():
            holders.setdefault(parameter, []).append(index)
    found: list[list[Tied]] = [[] for _ in module]
    for number, (parameter, indices) in enumerate(holders.items()):
        if len(indices) > 1:
            tied = Tied(number, parameter.nbytes, parameter.requires_grad)
            for index in indices:
                found[index].append(tied)
    return [tuple(of_layer) for of_layer in found]


def counted_once(layers: Sequence[LayerCount]) -> list[LayerCount]:
    """Return the counts of layers, with each shared parameter only in the first layer that has it.

    Args:
        layers: The counts of the layers of one device, or of a whole model.
    """
    seen: set[int] = set()
    found: list[LayerCount] = []
    for layer in layers:
        if not layer.tied:
            found.append(layer)
            continue
        again = [tied for tied in layer.tied if tied.number in seen]
        seen.update([tied.number for tied in layer.tied])
        found.append(_without(layer, again) if again else layer)
    return found


def _without(layer: LayerCount, again: Sequence[Tied]) -> LayerCount:
    sizes = list(layer.parameter_sizes)
    frozen = layer.frozen
    for tied in again:
        if tied.trained:
            sizes.remove(tied.bytes)
        else:
            frozen -= tied.bytes
    return layer._replace(parameters=sum(sizes), parameter_sizes=tuple(sizes), frozen=frozen)
