"""The part of a training's state that one process holds: `State`."""

import pickle
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from torchgpipe.partitioned import Partitioned
from torchgpipe.task.guards.randomness import default_generators

_STATE = "optimizer.state."

_PARAMETERS = ("params", "param_names")
"""The entries of an optimizer's group that list its parameters.

They depend on the balance. All other entries are options, such as the learning rate.
"""

Content = dict[str, Any]

Options = dict[str, Content]
"""The optimizer's options for each parameter, by the parameter's name."""


class State:
    """The state of a pipeline's layers in this process, of their optimizer, and of generators.

    Each value has a name, which does not depend on the balance. A parameter or buffer of the model
    is `model.NAME`, and a value that the optimizer holds for a parameter is
    `optimizer.state.NAME.KEY`. The generator of a layer is `generator.NAME`. PyTorch's default
    generator of a rank is `random.RANK`. If the device of a partition has a default generator of
    its own, that generator is `random.device.PARTITION`.

    Attributes:
        kind: The name of the optimizer's class, or `None` without an optimizer.
    """

    def __init__(self, model: Partitioned, optimizer: Optimizer | None, rank: int) -> None:
        self._model = model
        self.kind = None if optimizer is None else type(optimizer).__name__
        if optimizer is None:
            optimizer = torch.optim.SGD([{"params": []}])  # an optimizer without parameters
        self._optimizer = optimizer
        self._parameters = dict(model.named_parameters())
        state = optimizer.state_dict()
        self._states = state.pop("state")
        self._group_states = state.pop("param_groups")
        names = {p: name for name, p in self._parameters.items()}
        others = optimizer.state.keys() - names.keys()
        _check_nothing_else([*state, *others])
        self._groups = _named_groups(optimizer, names)
        # The optimizer numbers its parameters in the order of its groups.
        self._names: list[str] = []
        for group in self._groups:
            self._names += group
        self._generators = _generators_of(model)
        self._defaults = {f"random.{rank}": torch.default_generator}
        for partition, device in model._held:
            for generator in default_generators(device)[1:]:
                self._defaults[f"random.device.{partition}"] = generator

    def content(self) -> Content:
        """Return all values that are to be saved."""
        content = self.fixed()
        for key, generator in self._defaults.items():
            content[key] = generator.get_state()
        for number, values in self._states.items():
            name = self._names[number]
            for key, value in values.items():
                content[f"{_STATE}{name}.{key}"] = value
        return content

    def fixed(self) -> Content:
        """Return the values whose names, types and shapes are determined by the layers."""
        fixed: Content = {}
        for name, x in self._model.state_dict().items():
            fixed[f"model.{name}"] = x
        for key, generator in self._generators.items():
            fixed[key] = generator.get_state()
        return fixed

    def options(self) -> Options:
        """Return the optimizer's options for each parameter.

        The parameters of one group share one dictionary, so that pickle writes it only once.
        """
        options: Options = {}
        for names, group in zip(self._groups, self._group_states, strict=True):
            given: Content = {}
            for key, value in group.items():
                if key not in _PARAMETERS:
                    given[key] = value.cpu() if isinstance(value, Tensor) else value
            options |= dict.fromkeys(names, given)
        return options

    def wanted(self, keys: Collection[str], *, same_ranks: bool) -> list[str]:
        """Return the keys of a saved state that this process reads.

        Args:
            keys: All keys of the saved state.
            same_ranks: Whether the state was saved by as many ranks as there are now.
        """
        fixed = self.fixed()
        names = {*self._names}
        wanted = [key for key in keys if key in fixed or parameter(key) in names]
        for key, _ in self._drawing(keys, same_ranks):
            wanted.append(key)
        return wanted

    def packed(self, content: Mapping[str, Any], options: Options) -> Content:
        """Return the optimizer's state in the form that its `load_state_dict` takes.

        Args:
            content: The values that were read from the saved state.
            options: The saved options of every parameter.

        Raises:
            ValueError: If parameters of one group had different options when they were saved.
        """
        states = self._states_by_name(content)
        numbered: dict[int, Content] = {}
        for number, name in enumerate(self._names):
            if name in states:
                numbered[number] = states[name]
        groups = []
        for names, group in zip(self._groups, self._group_states, strict=True):
            saved = options[names[0]] if names else {}
            _check_one_group(names, options)
            placed = dict(group)
            for option, value in saved.items():
                placed[option] = _placed(value, group.get(option))
            groups.append(placed)
        return {"state": numbered, "param_groups": groups}

    def _states_by_name(self, content: Mapping[str, Any]) -> dict[str, Content]:
        """Return what the optimizer holds for each parameter, with the parameter's strides."""
        states: dict[str, Content] = defaultdict(dict)
        for key, value in content.items():
            name = parameter(key)
            if name is None:
                continue
            p = self._parameters[name]
            alike = isinstance(value, Tensor) and value.shape == p.shape
            if alike and value.stride() != p.stride():
                value = torch.empty_like(p, dtype=value.dtype, device="cpu").copy_(value)
            _, _, own_key = key.rpartition(".")
            states[name][own_key] = value
        return states

    def put(self, content: Mapping[str, Any], packed: Content, *, same_ranks: bool) -> None:
        """Put what was read into layers, optimizer and generators, and delete all gradients.

        Gradients would belong to the parameters' earlier values.

        Args:
            content: The values that were read from the saved state.
            packed: The optimizer's state, as `packed` returns it.
            same_ranks: Whether the state was saved by as many ranks as there are now.
        """
        for p in self._parameters.values():
            p.grad = None
        layers: Content = {}
        for key, value in content.items():
            if key.startswith("model."):
                layers[key.removeprefix("model.")] = value
        self._model.load_state_dict(layers)
        for key, generator in self._generators.items():
            generator.set_state(content[key])
        self._optimizer.load_state_dict(packed)
        self._restore_types(packed["state"])
        for key, generator in self._drawing(content, same_ranks):
            generator.set_state(content[key])

    def _restore_types(self, states: dict[int, Content]) -> None:
        """Undo the casts of `load_state_dict`, which gives each value the type of its parameter."""
        for number, values in states.items():
            p = self._parameters[self._names[number]]
            state = self._optimizer.state[p]
            for key, saved in values.items():
                if isinstance(saved, Tensor) and state[key].dtype != saved.dtype:
                    state[key] = saved.to(state[key].device)

    def _drawing(self, keys: Collection[str], same_ranks: bool) -> list[tuple[str, Generator]]:
        """Return each default generator with the key of the saved state that it gets.

        That is the generator's own key, or the key of the first rank or partition if the number of
        ranks has changed or the state has no such key.
        """
        drawing = []
        for own, generator in self._defaults.items():
            kind, _, _ = own.rpartition(".")
            key = own if same_ranks and own in keys else f"{kind}.0"
            if key in keys:
                drawing.append((key, generator))
        return drawing


def _check_nothing_else(held: list[Any]) -> None:
    """Raise `ValueError` if an optimizer holds anything beside the states of its parameters."""
    if held:
        other = held[0]
        what = repr(other)
        if isinstance(other, Tensor):
            what = f"a tensor of shape {list(other.shape)}"
        raise ValueError(
            f"the optimizer holds {what} beside the states of parameters, which would be lost; "
            "save the layers without the optimizer, and its state by a name of its own"
        )


def _named_groups(optimizer: Optimizer, names: Mapping[Parameter, str]) -> list[list[str]]:
    """Return the names of the parameters of each of an optimizer's groups."""
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        if any(p not in names for p in parameters):
            raise ValueError(
                "the optimizer has a parameter that the model does not have; give what else is "
                "trained an optimizer of its own, and save the states of both under names of their "
                "own"
            )
        groups.append([names[p] for p in parameters])
    return groups


def _generators_of(model: Partitioned) -> dict[str, Generator]:
    """Return the generators that are attributes of layers, by their keys in a saved state."""
    generators = {}
    for name, module in model.named_modules():
        for attribute, value in module.__dict__.items():
            if type(value) is Generator:
                generators[f"generator.{name}.{attribute}"] = value
    return generators


def _check_one_group(names: list[str], options: Options) -> None:
    """Raise `ValueError` if the saved options of one group's parameters differ."""
    for name in names:
        for option, first in options[names[0]].items():
            other = options[name].get(option)
            if not same(first, other):
                raise ValueError(
                    f"the optimizer has {names[0]!r} and {name!r} in one group, but in the saved "
                    f"state their options differ: {option} is {first} and {other}"
                )


def parameter(key: str) -> str | None:
    """Return the name of the parameter for which an optimizer holds the value of this key.

    A key of another kind gives `None`.
    """
    if not key.startswith(_STATE):
        return None
    name, _, _ = key.removeprefix(_STATE).rpartition(".")
    return name


def _placed(saved: Any, now: Any) -> Any:
    """Return a saved option; a tensor is moved to the device of the present option."""
    if isinstance(saved, Tensor) and isinstance(now, Tensor):
        return saved.to(now.device)
    return saved


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal; they may be nested plain values and tensors.

    NaN equals NaN.
    """
    if type(x) is not type(y):
        return False
    if isinstance(x, Tensor):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        return torch.equal(x, y) or torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return pickle.dumps(x) == pickle.dumps(y) or bool(x == y)
