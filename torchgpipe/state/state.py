"""The part of a training's state that one process saves and loads: `State`."""

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

These entries depend on the balance. All other entries are options, such as the learning rate.
"""

Content = dict[str, Any]

Options = dict[str, Content]
"""Maps the name of a parameter to the optimizer's options for the parameter."""


class State:
    """The state of this process's layers, of their optimizer, and of random generators.

    Each value has a key. The keys of layers and optimizers do not depend on the balance.

        model.NAME                  a parameter or buffer
        optimizer.state.NAME.KEY    a value that the optimizer holds for a parameter
        generator.NAME              a generator that is an attribute of a layer
        random.RANK                 the default CPU generator of a rank
        random.device.PARTITION     the default generator of a partition's GPU

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
        """Return a dictionary of all values to save."""
        content = self.fixed()
        for key, generator in self._defaults.items():
            content[key] = generator.get_state()
        for number, values in self._states.items():
            name = self._names[number]
            for key, value in values.items():
                content[f"{_STATE}{name}.{key}"] = value
        return content

    def fixed(self) -> Content:
        """Return the values to save of the layers: parameters, buffers and states of generators.

        A saved state fits these layers only if it has the same keys, dtypes and shapes.
        """
        fixed: Content = {}
        for name, x in self._model.state_dict().items():
            fixed[f"model.{name}"] = x
        for key, generator in self._generators.items():
            fixed[key] = generator.get_state()
        return fixed

    def options(self) -> Options:
        """Return the optimizer's options, such as the learning rate, for each parameter name.

        The parameters of one group share a single dictionary, so that pickle writes it only once.
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
            same_ranks: Whether the number of ranks is the same as when the state was saved.
        """
        fixed = self.fixed()
        names = {*self._names}
        wanted = [key for key in keys if key in fixed or parameter(key) in names]
        for key, _ in self._drawing(keys, same_ranks):
            wanted.append(key)
        return wanted

    def packed(self, content: Mapping[str, Any], options: Options) -> Content:
        """Return the argument for the optimizer's `load_state_dict`, from a saved state.

        Args:
            content: The values that were read from the saved state.
            options: The saved options of each parameter, by the parameter's name.

        Raises:
            ValueError: If two parameters of one group had different options in the saved state.
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
        """Return the optimizer's saved values of each parameter, by the parameter's name.

        A tensor that has the shape of its parameter gets the parameter's strides, too.
        """
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
        """Load values into the layers, the optimizer and the generators, and delete all gradients.

        Gradients are deleted because they belong to earlier values of the parameters.

        Args:
            content: The values that were read from the saved state.
            packed: The optimizer's state, from the method `packed`.
            same_ranks: Whether the number of ranks is the same as when the state was saved.
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
        """Restore the saved dtypes of the optimizer's tensors.

        The optimizer's `load_state_dict` has converted them to the dtypes of their parameters.
        """
        for number, values in states.items():
            p = self._parameters[self._names[number]]
            state = self._optimizer.state[p]
            for key, saved in values.items():
                if isinstance(saved, Tensor) and state[key].dtype != saved.dtype:
                    state[key] = saved.to(state[key].device)

    def _drawing(self, keys: Collection[str], same_ranks: bool) -> list[tuple[str, Generator]]:
        """Return pairs: a key of the saved state, and the default generator that loads its value.

        A generator loads the value of its own key, if the number of ranks is the same as before and
        the saved state has this key. Otherwise, a CPU generator loads the value of rank 0, and a
        GPU's generator loads the value of partition 0.
        """
        drawing = []
        for own, generator in self._defaults.items():
            kind, _, _ = own.rpartition(".")
            key = own if same_ranks and own in keys else f"{kind}.0"
            if key in keys:
                drawing.append((key, generator))
        return drawing


def _check_nothing_else(held: list[Any]) -> None:
    """Raise `ValueError` if an optimizer has state that does not belong to a parameter.

    Args:
        held: The keys of such state; empty if there is none.
    """
    if held:
        other = held[0]
        what = repr(other)
        if isinstance(other, Tensor):
            what = f"a tensor of shape {list(other.shape)}"
        raise ValueError(
            f"the optimizer holds {what}, which belongs to no parameter and would not be saved; "
            "call save() with optimizer=None, and pass the optimizer's state_dict() to save() as "
            "one more keyword argument"
        )


def _named_groups(optimizer: Optimizer, names: Mapping[Parameter, str]) -> list[list[str]]:
    """Return, for each parameter group of an optimizer, the names of its parameters."""
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        if any(p not in names for p in parameters):
            raise ValueError(
                "the optimizer has a parameter that the model does not have; use a separate "
                "optimizer for parameters outside the model, and pass its state_dict() to save() "
                "as one more keyword argument"
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
    """Raise `ValueError` if the parameters of one group (`names`) have different saved options."""
    for name in names:
        for option, first in options[names[0]].items():
            other = options[name].get(option)
            if not same(first, other):
                raise ValueError(
                    f"the optimizer has {names[0]!r} and {name!r} in one group, but in the saved "
                    f"state their options differ: {option} is {first} for the first parameter and "
                    f"{other} for the second"
                )


def parameter(key: str) -> str | None:
    """Return NAME if a key has the form `optimizer.state.NAME.KEY`, or `None` for other keys."""
    if not key.startswith(_STATE):
        return None
    name, _, _ = key.removeprefix(_STATE).rpartition(".")
    return name


def _placed(saved: Any, now: Any) -> Any:
    """Return the saved value of an option.

    A saved tensor is moved to the device of the option's current value (`now`).
    """
    if isinstance(saved, Tensor) and isinstance(now, Tensor):
        return saved.to(now.device)
    return saved


def same(x: Any, y: Any) -> bool:
    """Return whether two values, such as tensors or nested dictionaries and lists, are equal.

    NaN counts as equal to NaN.
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
