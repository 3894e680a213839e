"""A pipeline keeps the balance that it was made with."""

from typing import NoReturn

from torch import nn


class FixedBalance(nn.Module):
    """A module whose `balance` can be read, and raises an error if it is set."""

    _balance: list[int]

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition."""
        return self._balance

    @balance.setter
    def balance(self, balance: object) -> NoReturn:
        """Raise `AttributeError`, because the layers are on their devices already."""
        raise AttributeError(
            f"a pipeline keeps the balance that it was made with, {self._balance}; to use "
            f"{balance}, make a new pipeline from the layers, and a new optimizer"
        )
