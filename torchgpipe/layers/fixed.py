"""Refuse to change the balance of a pipeline after the pipeline was made."""

from typing import NoReturn

from torch import nn


class FixedBalance(nn.Module):
    """A base class of pipelines: `balance` can be read, but setting it raises an error."""

    _balance: list[int]

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition."""
        return self._balance

    @balance.setter
    def balance(self, balance: object) -> NoReturn:
        """Raise `AttributeError`, because the layers are on the devices of the old balance."""
        raise AttributeError(
            f"a pipeline keeps the balance that it was made with, {self._balance}; to use "
            f"{balance}, make a new pipeline of the layers with this balance, and a new optimizer"
        )
