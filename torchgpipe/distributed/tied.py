"""Parameters that layers on several ranks share: `TiedParameters`.

Many language models use one weight twice: in the embedding, which is their first layer, and in the
head, which is their last one. Over ranks, each rank that has one of these layers has a copy of the
weight. The copies are equal when the pipeline is made. After the last backward of a mini-batch, the
ranks send each other their gradients, and each rank computes the sum of all of them, in the same
order (Narayanan et al., arXiv:2104.04473, do the same). In this picture, time goes downward:

    rank of the embedding          rank of the head
    ---------------------          ----------------
    backward, gradient g0          backward, gradient g1
                     ---- g0 ---->
                     <--- g1 -----
    gradient g0 + g1               gradient g0 + g1

So optimizers of the same kind make the same change to each copy, and the copies stay equal. This is
checked from time to time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from torchgpipe.distributed.connections import Connections
from torchgpipe.distributed.wires.receiver import Receiver
from torchgpipe.distributed.wires.sender import Sender
from torchgpipe.engine.program import BatchIO
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.tensors.microbatch import Flat

CHECKED_EVERY = 100
"""After how many mini-batches the copies of a parameter are compared again."""


class TiedParameter(NamedTuple):
    """A parameter that layers on several ranks share.

    Attributes:
        names: For each rank that has a copy, the parameter's first name on this rank. The ranks are
            in the order of their first layer that uses the parameter.
        last: The rank of the last layer that uses the parameter.
        module, attribute: A module on this rank that has the parameter, and the attribute's name.
    """

    names: dict[int, str]
    last: int
    module: nn.Module
    attribute: str

    def __str__(self) -> str:
        found = [f"{name!r} on rank {rank}" for rank, name in self.names.items()]
        return f"{', '.join(found[:-1])} and {found[-1]}"

    def parameter(self) -> nn.Parameter:
        """Return this rank's copy.

        Raises:
            TypeError: If the parameter is sharded over further ranks.
        """
        p = self.module._parameters[self.attribute]
        if hasattr(p, "device_mesh"):
            raise TypeError(
                f"{self} are one parameter, and it is a DTensor (fully_shard or parallelize_module "
                "made it), whose gradients a pipeline cannot add up over its ranks; replicate "
                "these layers, or give each layer a parameter of its own"
            )
        return cast(nn.Parameter, p)


class TiedParameters:
    """The parameters of which this rank has a copy, and other ranks have others.

    Args:
        partitions: All partitions of the model, in order.
        placement: The rank of each partition.
        own: This rank.

    Attributes:
        peers: The other ranks that share a parameter with this rank.
    """

    def __init__(self, partitions: Iterable[nn.Module], placement: Iterable[int], own: int) -> None:
        self._own = own
        self._tied = [*_found(partitions, placement, own)]
        self.peers: set[int] = set()
        for each in self._tied:
            self.peers |= each.names.keys() - {own}

    def copies(self) -> dict[nn.Parameter, str]:
        """Return this rank's copies of parameters whose first use is on another rank.

        The values are the parameters' names there. The plain model lists them under these names.
        """
        found = {}
        for tied in self._tied:
            first, *_ = tied.names
            if first != self._own:
                found[tied.parameter()] = tied.names[first]
        return found

    def begin_equal(self, connections: Connections) -> None:
        """Set all copies of each tied parameter to the values of its last use in the model.

        Without a pipeline, `init` fills one parameter several times, and its last values stay.
        """
        for tied in self._tied:
            p = tied.parameter()
            if p.is_meta or nn.parameter.is_lazy(p):
                continue
            if self._own == tied.last:
                for peer in tied.names.keys() - {self._own}:
                    sender = connections.wire(Sender, "tied values", peer)
                    sender.begin()
                    sender.give(connections.message("values", (p.detach().cpu(),)))
            else:
                receiver = connections.wire(Receiver, "tied values", tied.last)
                receiver.begin()
                _, (values,) = connections.take(receiver)
                assert values is not None
                p.data.copy_(values)
        connections.deliver()

    def add_up(self, connections: Connections, guards: Sequence[StageGuards], io: BatchIO) -> None:
        """Replace the gradient of each tied parameter by the sum over all ranks that have a copy.

        Args:
            connections: The connections of this rank.
            guards: The guards of this rank's stages, which have the gradients of the stages.
            io: In a `step`, it has the gradients of what the criterion has used.

        Raises:
            RuntimeError: If the copies of a parameter differ, or only some of them require grad.
        """
        for peer in self.peers:
            connections.wire(Sender, "tied gradients", peer).begin()
            connections.wire(Receiver, "tied gradients", peer).begin()
        own = []
        for tied in self._tied:
            told = self._told(tied, connections.serial, guards, io)
            for peer in tied.names.keys() - {self._own}:
                sender = connections.wire(Sender, "tied gradients", peer)
                sender.give(connections.message("gradient", told))
            own.append(told)
        for tied, told in zip(self._tied, own, strict=True):
            heard = {self._own: told}
            for peer in tied.names.keys() - {self._own}:
                receiver = connections.wire(Receiver, "tied gradients", peer)
                _, heard[peer] = connections.take(receiver)
            _check_equal(tied, heard)
            p = tied.parameter()
            if p.requires_grad:
                # All ranks add in the same order, so all get the same bits.
                total = _added(heard[rank][1] for rank in tied.names)
                _put(p, total, guards)

    def _told(
        self, tied: TiedParameter, serial: int, guards: Sequence[StageGuards], io: BatchIO
    ) -> Flat:
        """Return what this rank tells the others about a tied parameter: its state and gradient.

        The state says whether the parameter requires grad. Sometimes it also has a checksum of the
        parameter, and otherwise zero.
        """
        p = tied.parameter()
        checksum = _checksum(p) if serial % CHECKED_EVERY == 1 else 0
        state = torch.tensor([int(p.requires_grad), checksum], device="cpu")
        gradients = [io.take_sum(p)]
        gradients += [stand_in.grad for stand_in in _stand_ins(p, guards)]
        gradient = _added(gradients)
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()  # messages have no sparse tensors
        return state, gradient


def _found(
    partitions: Iterable[nn.Module], placement: Iterable[int], own: int
) -> Iterator[TiedParameter]:
    """Yield the parameters that this rank's partitions share with partitions of other ranks."""
    uses: dict[nn.Parameter, list[tuple[int, str, nn.Module, str]]] = {}
    for partition, rank in zip(partitions, placement, strict=True):
        for path, module in partition.named_modules():
            for attribute, p in module._parameters.items():
                if p is not None:
                    use = rank, f"{path}.{attribute}", module, attribute
                    uses.setdefault(p, []).append(use)
    for found in uses.values():
        names: dict[int, str] = {}
        for rank, name, _, _ in found:
            names.setdefault(rank, name)
        if len(names) > 1 and own in names:
            last = found[-1][0]
            _, _, module, attribute = next(use for use in found if use[0] == own)
            yield TiedParameter(names, last, module, attribute)


def _stand_ins(p: nn.Parameter, guards: Sequence[StageGuards]) -> list[Tensor]:
    """Return the tensors that replace a parameter in this rank's stages while they run."""
    by_stage = [each.parameters.by_parameter for each in guards]
    return [stand_ins[p] for stand_ins in by_stage if p in stand_ins]


def _put(p: nn.Parameter, total: Tensor | None, guards: Sequence[StageGuards]) -> None:
    """Replace the gradients of a parameter's stand-ins: one of them gets `total`, others none."""
    first, *others = _stand_ins(p, guards)
    first.grad = total
    for stand_in in others:
        stand_in.grad = None


def _checksum(p: nn.Parameter) -> int:
    """Return a number that differs, most likely, for parameters whose values differ."""
    content = p.detach().contiguous().reshape(-1).view(torch.uint8)
    return int(content.sum(dtype=torch.int64))


def _check_equal(tied: TiedParameter, heard: Mapping[int, Flat]) -> None:
    """Raise `RuntimeError` if ranks have told different states of a tied parameter."""
    needs, sums = set(), set()
    for state, _ in heard.values():
        assert state is not None
        requires_grad, checksum = state.tolist()
        needs.add(requires_grad)
        sums.add(checksum)
    if len(needs) > 1:
        raise RuntimeError(
            f"{tied} are one parameter, but only some of them require grad; freeze all of them, or "
            "none"
        )
    if len(sums) > 1:
        raise RuntimeError(
            f"{tied} are one parameter, but their values differ; load the same state on all ranks, "
            "and give each of their optimizers the same options, such as the learning rate and the "
            "weight decay"
        )


def _added(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Return the sum of tensors, or `None` if there is none. `None` counts as zero."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total
