"""What of a training a process holds, by names that do not depend on the balance: `State`."""

import pickle
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchgpipe.partitioned import Partitioned
from torchgpipe.task.guards.randomness import default_generators

_STATE = "optimizer.state."

_PARAMETERS = ("params", "param_names")
"""What of an optimizer's group says which parameters it has. That depends on the balance; the rest are options."""

Options = dict[str, dict[str, Any]]
"""An optimizer's options for each of its parameters."""


class State:
    """The state of a pipeline's layers in this process, of their optimizer, and of generators.

    A part of the model is named `model.NAME`, and what the optimizer holds for a parameter `optimizer.state.NAME.KEY`.
    The generator of a layer is `generator.NAME`. Default generators are `random.RANK`, and `random.device.PARTITION`
    where a partition's device has one of its own.
    """

    def __init__(self, model: Partitioned, optimizer: Optimizer | None, rank: int) -> None:
        self._model = model
        self.kind = None if optimizer is None else type(optimizer).__name__
        self._optimizer = optimizer = optimizer or torch.optim.SGD(
            [{"params": []}]
        )  # one of no parameter
        self._parameters = dict(model.named_parameters())
        names = {p: name for name, p in self._parameters.items()}
        state = optimizer.state_dict()
        self._states, self._group_states = state.pop("state"), state.pop("param_groups")
        if held := [*state, *(optimizer.state.keys() - names.keys())]:
            what = (
                f"a tensor of shape {[*held[0].shape]}"
                if isinstance(held[0], Tensor)
                else repr(held[0])
            )
            raise ValueError(
                f"the optimizer holds {what} beside the states of parameters, which would be lost; save the layers "
                "without the optimizer, and its state by a name of its own"
            )
        self._groups: list[list[str]] = []
        for group in optimizer.param_groups:
            if not all(p in names for p in group["params"]):
                raise ValueError(
                    "the optimizer has a parameter that the model does not have; give what else is trained an "
                    "optimizer of its own, and save the states of both under names of their own"
                )
            self._groups.append([names[p] for p in group["params"]])
        self._names = [
            name for group in self._groups for name in group
        ]  # the optimizer numbers them like this
        self._generators = {
            f"generator.{name}.{attribute}": value
            for name, module in model.named_modules()
            for attribute, value in module.__dict__.items()
            if type(value) is torch.Generator
        }
        self._defaults = {f"random.{rank}": torch.default_generator} | {
            f"random.device.{j}": g
            for j, device in model._held
            for g in default_generators(device)[1:]
        }

    def content(self) -> dict[str, Any]:
        """Return all that there is to save."""
        content = self.fixed() | {
            key: generator.get_state() for key, generator in self._defaults.items()
        }
        for k, values in self._states.items():
            content |= {f"{_STATE}{self._names[k]}.{key}": x for key, x in values.items()}
        return content

    def fixed(self) -> dict[str, Any]:
        """Return the part whose names, types and shapes the layers decide."""
        layers = {f"model.{name}": x for name, x in self._model.state_dict().items()}
        return layers | {key: generator.get_state() for key, generator in self._generators.items()}

    def options(self) -> Options:
        """Return the optimizer's options. Parameters of one group have them in common: pickled, they are there once."""
        options: Options = {}
        for names, group in zip(self._groups, self._group_states, strict=True):
            given = {
                key: x.cpu() if isinstance(x, Tensor) else x
                for key, x in group.items()
                if key not in _PARAMETERS
            }
            options |= dict.fromkeys(names, given)
        return options

    def wanted(self, keys: Collection[str], *, same_ranks: bool) -> list[str]:
        """Return the keys of a saved state that this process reads. `same_ranks`: as many ranks have saved it."""
        fixed, names = self.fixed(), {*self._names}
        wanted = [key for key in keys if key in fixed or parameter(key) in names]
        return wanted + [key for key, _ in self._drawing(keys, same_ranks)]

    def packed(self, content: Mapping[str, Any], options: Options) -> dict[str, Any]:
        """Return the optimizer's state as its `load_state_dict` takes it, if those of one group had equal options."""
        states: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, x in content.items():
            if (name := parameter(key)) is not None:
                p = self._parameters[name]
                if isinstance(x, Tensor) and x.shape == p.shape and x.stride() != p.stride():
                    x = torch.empty_like(p, dtype=x.dtype, device="cpu").copy_(
                        x
                    )  # placed in memory as it was
                states[name][key.rpartition(".")[2]] = x
        groups = []
        for names, group in zip(self._groups, self._group_states, strict=True):
            saved = options[names[0]] if names else {}
            for name in names:
                for option, x in saved.items():
                    if not same(x, other := options[name].get(option)):
                        raise ValueError(
                            f"the optimizer has {names[0]!r} and {name!r} in one group, but in the saved state their "
                            f"options differ: {option} is {x} and {other}"
                        )
            groups.append(
                group | {option: _placed(x, group.get(option)) for option, x in saved.items()}
            )
        numbered = {k: states[name] for k, name in enumerate(self._names) if name in states}
        return {"state": numbered, "param_groups": groups}

    def put(self, content: Mapping[str, Any], packed: dict[str, Any], *, same_ranks: bool) -> None:
        """Change layers, optimizer and generators to what was read; let go of gradients, which are of another state."""
        for p in self._parameters.values():
            p.grad = None
        layers = {
            key.removeprefix("model."): x for key, x in content.items() if key.startswith("model.")
        }
        self._model.load_state_dict(layers)
        for key, generator in self._generators.items():
            generator.set_state(content[key])
        self._optimizer.load_state_dict(packed)
        for k, values in packed["state"].items():
            state = self._optimizer.state[self._parameters[self._names[k]]]
            for key, x in values.items():
                if (
                    isinstance(x, Tensor) and state[key].dtype != x.dtype
                ):  # cast to the type of the parameter
                    state[key] = x.to(state[key].device)
        for key, generator in self._drawing(content, same_ranks):
            generator.set_state(content[key])

    def _drawing(
        self, keys: Collection[str], same_ranks: bool
    ) -> list[tuple[str, torch.Generator]]:
        """Return the default generators, and the key of the state that each gets: its own, or that of the first."""
        first = {key: f"{key.rpartition('.')[0]}.0" for key in self._defaults}
        found = [
            (k if same_ranks and k in keys else first[k], g) for k, g in self._defaults.items()
        ]
        return [(key, generator) for key, generator in found if key in keys]


def parameter(key: str) -> str | None:
    """Return the parameter for which an optimizer holds this; `None` if it is something else."""
    return key.removeprefix(_STATE).rpartition(".")[0] if key.startswith(_STATE) else None


def _placed(x: Any, now: Any) -> Any:
    return x.to(now.device) if isinstance(x, Tensor) and isinstance(now, Tensor) else x


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal, of whatever plain values and tensors they are made; NaN equals NaN."""
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
