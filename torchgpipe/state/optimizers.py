"""Get and set the state of an optimizer, with the names of its parameters as keys.

An optimizer itself uses numbers as keys. The numbers of the parameters depend on the balance of the
pipeline, but their names do not.
"""

import dataclasses
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

_STATE = "optimizer.state."

_PARAMETERS = ("params", "param_names")
"""The entries of an optimizer's group that list its parameters.

These entries depend on the balance. All other entries are options, such as the learning rate.
"""

Content = dict[str, Any]

Options = dict[str, Content]
"""Maps the name of a parameter to the optimizer's options for the parameter."""

Groups = dict[tuple[int, int], Content]
"""Maps the index of an optimizer and of a group in it to the group's options."""

Optimizers = Optimizer | Sequence[Optimizer] | None
"""The optimizers of a rank's parameters."""


class OptimizerState:
    """The state of one optimizer, with the names of its parameters as keys.

    A state has the values that the optimizer keeps for each parameter, such as momentum, and the
    optimizer's options, such as the learning rate.

    Args:
        optimizer: The optimizer.
        parameters: Maps the names of the parameters of this rank's layers to the parameters.

    Attributes:
        kind: The name of the optimizer's class.
        names: The names of the optimizer's parameters, in the order in which the optimizer numbers
            them.

    Raises:
        ValueError: If the optimizer has a parameter that is not in the layers, or state that does
            not belong to a parameter.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> None:
        self.kind = type(optimizer).__name__
        self._optimizer = optimizer
        self._parameters = parameters
        state = optimizer.state_dict()
        self._states = state.pop("state")
        self._group_states = state.pop("param_groups")
        names = {p: name for name, p in parameters.items()}
        others = optimizer.state.keys() - names.keys()
        _check_nothing_else([*state, *others])
        self._groups = _named_groups(optimizer, names)
        self.names: list[str] = []
        for group in self._groups:
            self.names += group

    def content(self) -> Content:
        """Return what the optimizer keeps for each parameter, such as momentum, as a dictionary.

        The keys have the form `optimizer.state.NAME.KEY`, where NAME is the parameter's name.
        """
        content: Content = {}
        for number, values in self._states.items():
            name = self.names[number]
            for key, value in values.items():
                content[f"{_STATE}{name}.{key}"] = value
        return content

    def options(self) -> Options:
        """Return a dictionary from each parameter's name to its options, such as the learning rate.

        The parameters of one group share one dictionary of options, so that pickle writes this
        dictionary only once.
        """
        options: Options = {}
        for names, given in zip(self._groups, self.groups(), strict=True):
            options |= dict.fromkeys(names, given)
        return options

    def groups(self) -> list[Content]:
        """Return the options of each group, also of groups without parameters on this rank."""
        groups = []
        for group in self._group_states:
            given: Content = {}
            for key, value in group.items():
                if key not in _PARAMETERS:
                    given[key] = value.cpu() if isinstance(value, Tensor) else value
            groups.append(given)
        return groups

    def packed(
        self, content: Mapping[str, Any], options: Options, of_groups: Mapping[int, Content]
    ) -> Content:
        """Convert the saved state to a dictionary that the optimizer's `load_state_dict` takes.

        Args:
            content: The keys and the values that were read from the saved state.
            options: The saved options of every parameter.
            of_groups: The saved options of groups, by the group's index. They are used for groups
                that have no parameters on this rank.

        Raises:
            ValueError: If two parameters of one group had different options in the saved state.
        """
        states = self._states_by_name(content)
        numbered: dict[int, Content] = {}
        for number, name in enumerate(self.names):
            if name in states:
                numbered[number] = states[name]
        groups = []
        given = zip(self._groups, self._group_states, strict=True)
        for index, (names, group) in enumerate(given):
            saved = options[names[0]] if names else of_groups.get(index, {})
            _check_one_group(names, options)
            placed = dict(group)
            for option, value in saved.items():
                placed[option] = _placed(value, group.get(option))
            groups.append(placed)
        return {"state": numbered, "param_groups": groups}

    def _states_by_name(self, content: Mapping[str, Any]) -> dict[str, Content]:
        """Return the saved values of each parameter of this optimizer, by the parameter's name.

        A saved tensor with the shape of its parameter is copied so that it has the parameter's
        strides.
        """
        own = {*self.names}
        states: dict[str, Content] = defaultdict(dict)
        for key, value in content.items():
            name = parameter_name(key)
            if name is None or name not in own:
                continue
            p = self._parameters[name]
            alike = isinstance(value, Tensor) and value.shape == p.shape
            if alike and value.stride() != p.stride():
                value = torch.empty_like(p, dtype=value.dtype, device="cpu").copy_(value)
            _, _, own_key = key.rpartition(".")
            states[name][own_key] = value
        return states

    def put(self, packed: Content) -> None:
        """Load into the optimizer a state (a dictionary) that the method `packed` has returned."""
        self._optimizer.load_state_dict(packed)
        # `load_state_dict` has converted the tensors of the state to the dtypes of their
        # parameters. Convert them back to the dtypes in which they were saved.
        for number, values in packed["state"].items():
            p = self._parameters[self.names[number]]
            state = self._optimizer.state[p]
            for key, saved in values.items():
                if isinstance(saved, Tensor) and state[key].dtype != saved.dtype:
                    state[key] = saved.to(state[key].device)


def states_of(optimizers: Optimizers, parameters: Mapping[str, Parameter]) -> list[OptimizerState]:
    """Return an `OptimizerState` for each optimizer that is given.

    `optimizers` can be an optimizer, a list of optimizers, or `None`.

    Raises:
        TypeError: If `optimizers` is neither an optimizer, nor a list of optimizers, nor `None`.
        ValueError: If two optimizers have the same parameter, or if an optimizer's state is spread
            over replicas.
    """
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    if not isinstance(listed, list | tuple) or not all(isinstance(x, Optimizer) for x in listed):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, a list of these, or None, but got "
            f"{type(optimizers).__name__}"
        )
    for optimizer in listed:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(
                "the state of a ZeroRedundancyOptimizer is spread over replicas, so one replica "
                "cannot save or load it; use the optimizer itself, or fully_shard and "
                "torch.distributed.checkpoint"
            )
    states = [OptimizerState(optimizer, parameters) for optimizer in listed]
    taken: set[str] = set()
    for state in states:
        if both := taken.intersection(state.names):
            raise ValueError(
                f"two optimizers have the parameter {min(both)}, but only the state of one can be "
                "saved; give each parameter to one optimizer"
            )
        taken.update(state.names)
    return states


def parameter_name(key: str) -> str | None:
    """Return the parameter's name, NAME, from a key of the form `optimizer.state.NAME.KEY`.

    For a key of another form, return `None`.
    """
    if not key.startswith(_STATE):
        return None
    name, _, _ = key.removeprefix(_STATE).rpartition(".")
    return name


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal: tensors, numbers, or dictionaries and lists of these.

    NaN counts as equal to NaN.
    """
    if type(x) is not type(y):
        return False
    if isinstance(x, Tensor):
        return _same_tensors(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [field.name for field in dataclasses.fields(x)]
        return all(same(getattr(x, name), getattr(y, name)) for name in names)
    return _same_objects(x, y)


def _same_tensors(x: Tensor, y: Tensor) -> bool:
    try:
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, check_device=False)
    except AssertionError:
        return False
    return True


def _same_objects(x: Any, y: Any) -> bool:
    if pickle.dumps(x) == pickle.dumps(y):
        return True
    try:
        return bool(x == y)
    except ValueError:  # arrays are compared element by element
        return False


def _check_nothing_else(held: list[Any]) -> None:
    """Raise `ValueError` if an optimizer has state that does not belong to a parameter.

    Args:
        held: The keys of state that does not belong to a parameter; empty if there is none.
    """
    if held:
        other = held[0]
        what = repr(other)
        if isinstance(other, Tensor):
            what = f"a tensor of shape {list(other.shape)}"
        raise ValueError(
            f"the optimizer's state has {what}, which belongs to no parameter and would be lost; "
            "call save() with optimizer=None, and pass the optimizer's state_dict() to save() as "
            "one more keyword argument"
        )


def _named_groups(optimizer: Optimizer, names: Mapping[Parameter, str]) -> list[list[str]]:
    """Return, for each parameter group of an optimizer, a list of its parameters' names."""
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


def _check_one_group(names: list[str], options: Options) -> None:
    """Raise `ValueError` if the saved options of a group's parameters differ.

    An optimizer has only one value of each option, such as the learning rate, for all parameters of
    a group.
    """
    for name in names:
        for option, first in options[names[0]].items():
            other = options[name].get(option)
            if not same(first, other):
                raise ValueError(
                    f"the optimizer has the parameters {names[0]!r} and {name!r} in one group, but "
                    f"in the saved state their options differ: {option} is {first} for the first "
                    f"parameter and {other} for the second"
                )


def _placed(saved: Any, now: Any) -> Any:
    """Return the saved value of an optimizer's option, such as the learning rate.

    If the saved value is a tensor, it is moved to the device of the option's current value (`now`).
    """
    if isinstance(saved, Tensor) and isinstance(now, Tensor):
        return saved.to(now.device)
    return saved
