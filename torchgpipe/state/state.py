"""Collect and restore the part of a training's state that belongs to one process."""

from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Generator, Tensor, nn, sparse_coo, strided
from torch.distributed.tensor import DTensor

from torchgpipe.partitioned import Partitioned
from torchgpipe.random.generators import default_generators
from torchgpipe.state.optimizers import (
    Content,
    Groups,
    Optimizers,
    Options,
    parameter_name,
    states_of,
)


def check_whole(model: nn.Module) -> None:
    """Raise `ValueError` if other ranks than the pipeline's may hold parts of its parameters.

    An example is `fully_shard` over several replicas of the pipeline. The ranks of one replica
    cannot save or load the state of the optimizer then.
    """
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and p.device_mesh.size() > 1:
            raise ValueError(
                f"the parameter {name!r} is a DTensor, as made by fully_shard, of which several "
                "replicas can hold parts, so the pipeline's ranks cannot save or load it alone; "
                "use torch.distributed.checkpoint directly (see docs/processes.md)"
            )


class State:
    """The state of this process's layers, optimizers and random generators.

    A state is a dictionary. Its keys have the forms below. The keys of layers and optimizers do not
    depend on the balance, so a state can be loaded into a pipeline with another balance.

        model.NAME                  a parameter or buffer
        optimizer.state.NAME.KEY    a value that the optimizer holds for a parameter
        generator.NAME              a generator that is an attribute of a layer
        random.RANK                 the default CPU generator of a rank
        random.device.PARTITION     the default generator of a partition's GPU

    Args:
        model: The pipeline, or layers without a pipeline.
        optimizers: The optimizers of the parameters.
        rank: The index of this rank.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, rank: int) -> None:
        self._model = model
        # If layers share a parameter, the model without a pipeline lists it only once, under its
        # first name. So the state of the parameter's optimizer is saved under this name, too.
        copies = model.copies() if isinstance(model, Partitioned) else {}
        self._parameters = {copies.get(p, name): p for name, p in model.named_parameters()}
        self._elsewhere = {*copies.values()}
        self._optimizers = states_of(optimizers, self._parameters)
        self._generators = _generators_of(model)
        self._defaults = {f"random.{rank}": torch.default_generator}
        held = model._held if isinstance(model, Partitioned) else []
        for partition, device in held:
            for generator in default_generators(device)[1:]:
                self._defaults[f"random.device.{partition}"] = generator

    def kinds(self) -> list[str]:
        """Return the names of the optimizers' classes."""
        return [optimizer.kind for optimizer in self._optimizers]

    def kind_of(self) -> dict[str, str]:
        """Return a dictionary from names of parameters to the class names of their optimizers."""
        kind_of: dict[str, str] = {}
        for optimizer in self._optimizers:
            kind_of |= dict.fromkeys(optimizer.names, optimizer.kind)
        return kind_of

    def content(self) -> Content:
        """Return a dictionary of all values that this process saves.

        A tied parameter is saved under each of its names. If several ranks have a copy of it, the
        optimizer's state of the parameter is saved only by the rank that has the original.
        """
        content = self.fixed()
        for key, generator in self._defaults.items():
            content[key] = generator.get_state()
        for optimizer in self._optimizers:
            content |= optimizer.content()
        own: Content = {}
        for key, value in content.items():
            name = parameter_name(key) or key.removeprefix("model.")
            if name not in self._elsewhere:
                own[key] = value
        return own

    def fixed(self) -> Content:
        """Return the layers' values that are saved: parameters, buffers and random generators.

        A saved state can be loaded into the layers only if its values have the same keys, dtypes
        and shapes.
        """
        fixed: Content = {}
        for name, x in self._model.state_dict().items():
            fixed[f"model.{name}"] = x
        for key, generator in self._generators.items():
            fixed[key] = generator.get_state()
        return fixed

    def options(self) -> Options:
        """Return the optimizers' options for each parameter."""
        options: Options = {}
        for optimizer in self._optimizers:
            options |= optimizer.options()
        return options

    def groups(self) -> Groups:
        """Return the options of each group of each optimizer.

        A rank may have no parameter of a group, and needs the group's options nevertheless.
        """
        groups: Groups = {}
        for index, optimizer in enumerate(self._optimizers):
            for number, options in enumerate(optimizer.groups()):
                groups[index, number] = options
        return groups

    def wanted(self, keys: Collection[str], *, same_ranks: bool) -> list[str]:
        """Return those keys of a saved state whose values this process needs.

        Args:
            keys: All keys of the saved state.
            same_ranks: Whether the number of ranks is the same as when the state was saved.
        """
        fixed = self.fixed()
        names = self.kind_of()
        wanted = [key for key in keys if key in fixed or parameter_name(key) in names]
        for key, _ in self._drawing(keys, same_ranks):
            wanted.append(key)
        return wanted

    def packed(self, content: Content, options: Options, groups: Groups) -> list[Content]:
        """Convert the saved state to dictionaries, one for the `load_state_dict` of each optimizer.

        Args:
            content: The values that were read from the saved state.
            options: The saved options of each parameter, by the parameter's name.
            groups: The saved options of each group of each optimizer.

        Raises:
            ValueError: If two parameters of one group had different options in the saved state.
        """
        packed = []
        for index, optimizer in enumerate(self._optimizers):
            own = {number: each for (of, number), each in groups.items() if of == index}
            packed.append(optimizer.packed(content, options, own))
        return packed

    def put(self, content: Content, packed: list[Content], *, same_ranks: bool) -> None:
        """Load saved values into the layers, the optimizers and the generators.

        All gradients are deleted, because they were computed for other values of the parameters.

        Args:
            content: The values that were read from the saved state.
            packed: The optimizers' states, from the method `packed`.
            same_ranks: Whether the number of ranks is the same as when the state was saved.
        """
        for p in self._parameters.values():
            p.grad = None
        layers: Content = OrderedDict()
        # `load_state_dict` gives each module the version of the class that saved its state. The
        # saved state has no versions, so take those of the present modules.
        vars(layers)["_metadata"] = getattr(self._model.state_dict(), "_metadata", {})
        for key, value in content.items():
            if key.startswith("model."):
                layers[key.removeprefix("model.")] = value
        self._resize_sparse(layers)
        self._model.load_state_dict(layers)
        for optimizer, state in zip(self._optimizers, packed, strict=True):
            optimizer.put(state)
        for key, generator in self._generators.items():
            generator.set_state(content[key])
        for key, generator in self._drawing(content, same_ranks):
            generator.set_state(content[key])

    @torch.no_grad()
    def _resize_sparse(self, saved: Content) -> None:
        """Resize compressed sparse tensors of the layers to the saved number of entries.

        `load_state_dict` can load a saved compressed sparse tensor only into a tensor that has as
        many entries.
        """
        for name, x in self._model.state_dict(keep_vars=True).items():
            compressed = isinstance(x, Tensor) and x.layout not in (strided, sparse_coo)
            if compressed and not name.endswith("_extra_state") and x.shape == saved[name].shape:
                x.resize_as_sparse_(saved[name])

    def _drawing(self, keys: Collection[str], same_ranks: bool) -> list[tuple[str, Generator]]:
        """Return pairs of a saved state's key and the default generator that loads the key's value.

        If the number of ranks is the same as before, and the saved state has the generator's own
        key, the pair has this key. Otherwise, a CPU generator loads the value of rank 0, and a
        GPU's generator loads the value of partition 0.
        """
        drawing = []
        for own, generator in self._defaults.items():
            kind, _, _ = own.rpartition(".")
            key = own if same_ranks and own in keys else f"{kind}.0"
            if key in keys:
                drawing.append((key, generator))
        return drawing


def _generators_of(model: nn.Module) -> dict[str, Generator]:
    """Return a dictionary of the random generators that are attributes of layers."""
    generators = {}
    for name, module in model.named_modules():
        for attribute, value in module.__dict__.items():
            if type(value) is Generator:
                generators[f"generator.{name}.{attribute}"] = value
    return generators
