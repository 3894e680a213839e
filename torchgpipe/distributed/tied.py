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

So optimizers of the same kind make the same change to each copy, and the copies stay equal. If
replicas of the pipeline average these gradients, the last bits of the averages can differ. So from
time to time, the copies are compared, and set to the values of the first rank that has a copy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.distributed.channels.receiver import Receiver
from torchgpipe.distributed.channels.sender import Sender
from torchgpipe.distributed.connections import Connections
from torchgpipe.engine.program import BatchIO
from torchgpipe.layers.checks import NOT_SHARDED
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.tensors.contents import equal
from torchgpipe.tensors.leaves import leaves_of
from torchgpipe.tensors.microbatch import Flat

COMPARED_EVERY = 100
"""In every hundredth mini-batch, the ranks compare their copies of a shared parameter.

They also compare them in the mini-batches 1, 2, 4, 8, ..., because most mistakes make the copies
differ soon. For example, if the optimizers' first steps differ, the copies differ in the second
mini-batch.
"""


class TiedParameter(NamedTuple):
    """A parameter that layers on several ranks share.

    Attributes:
        names: For each rank that has a copy, the parameter's first name on that rank. The ranks are
            in the order of their first layer that uses the parameter.
        last: The rank of the last layer that uses the parameter.
        module, attribute: A module on this rank that has the parameter as an attribute, and the
            name of this attribute.
    """

    names: dict[int, str]
    last: int
    module: nn.Module
    attribute: str

    def __str__(self) -> str:
        found = [f"{name!r} on rank {rank}" for rank, name in self.names.items()]
        return f"{', '.join(found[:-1])} and {found[-1]}"

    def parameter(self) -> nn.Parameter:
        """Return this rank's copy of the parameter.

        Raises:
            RuntimeError: If the layer does not have the parameter any more.
            TypeError: If the parameter is a `DTensor`, which `fully_shard`, for example, makes.
        """
        p = self.module._parameters.get(self.attribute)
        if p is None:
            raise RuntimeError(
                f"the copies {self} were one parameter when the pipeline was made, but this rank's "
                "layer no longer has its copy; change the layers first, then wrap them in a "
                "DistributedGPipe"
            )
        if hasattr(p, "device_mesh"):
            raise TypeError(
                f"the copies {self} are one parameter, and it is a DTensor (made by fully_shard or "
                "parallelize_module), whose gradients a pipeline cannot add up over its ranks; "
                f"do not shard these layers; for replicas, {NOT_SHARDED}"
            )
        return p


class TiedParameters:
    """The parameters of which this rank and at least one other rank have a copy.

    Args:
        partitions: All partitions of the model, in order.
        placement: The rank of each partition.
        own: This rank.

    Attributes:
        peers: The other ranks that share a parameter with this rank.
    """

    def __init__(self, partitions: Iterable[nn.Module], placement: Iterable[int], own: int) -> None:
        self._own = own
        self._mini_batches = 0
        self._tied = [*_found(partitions, placement, own)]
        self.peers: set[int] = set()
        for each in self._tied:
            self.peers |= each.names.keys() - {own}

    def copies(self) -> dict[nn.Parameter, str]:
        """Return those parameters of this rank that are copies of another rank's parameter.

        If layers on several ranks share a parameter, the rank of the first of these layers has the
        original, and the other ranks have copies. The dictionary maps each copy on this rank to the
        name of the original, under which a model without a pipeline lists the parameter.
        """
        found = {}
        for tied in self._tied:
            first, *_ = tied.names
            if first != self._own:
                found[tied.parameter()] = tied.names[first]
        return found

    def begin_equal(self, connections: Connections) -> None:
        """Make all copies of each tied parameter equal.

        The rank of the last layer that uses the parameter sends the parameter's values to the other
        ranks. So the values are the same as without a pipeline, where `init` is called for one
        layer after the other, and its last call overwrites the values of earlier calls.
        """
        for tied in self._tied:
            p = tied.parameter()
            if p.is_meta or nn.parameter.is_lazy(p):
                continue
            if self._own == tied.last:
                for peer in tied.names.keys() - {self._own}:
                    sender = connections.channel(Sender, "tied values", peer)
                    sender.begin()
                    sender.give(connections.message("values", (p.detach().cpu(),)))
            else:
                receiver = connections.channel(Receiver, "tied values", tied.last)
                receiver.begin()
                _, (values,) = connections.take(receiver)
                assert values is not None
                p.data.copy_(values)
        connections.deliver()

    def begin_again(self) -> None:
        """Count mini-batches from 0 again; after a failure, ranks may have counted differently."""
        self._mini_batches = 0

    def add_up(self, connections: Connections, guards: Sequence[StageGuards], io: BatchIO) -> None:
        """Replace the gradient of each tied parameter by the sum over all ranks that have a copy.

        Args:
            connections: The connections of this rank.
            guards: The `StageGuards` of this rank's stages. They hold the gradients that the
                stages' backwards have computed.
            io: The inputs and outputs of the run. In a `step`, it holds the gradients from criteria
                that use parameters.

        Raises:
            RuntimeError: If the copies of a parameter differ, or only some of them require grad.
        """
        for peer in self.peers:
            connections.channel(Sender, "tied gradients", peer).begin()
            connections.channel(Receiver, "tied gradients", peer).begin()
        self._mini_batches += 1
        is_power_of_two = self._mini_batches.bit_count() == 1
        compares = is_power_of_two or self._mini_batches % COMPARED_EVERY == 0
        own = []
        for tied in self._tied:
            told = self._told(tied, guards, io, compares=compares)
            for peer in tied.names.keys() - {self._own}:
                sender = connections.channel(Sender, "tied gradients", peer)
                sender.give(connections.message("gradient", told))
            own.append(told)
        for tied, told in zip(self._tied, own, strict=True):
            heard = {self._own: told}
            for peer in tied.names.keys() - {self._own}:
                receiver = connections.channel(Receiver, "tied gradients", peer)
                _, heard[peer] = connections.take(receiver)
            _check_alike(tied, heard)
            p = tied.parameter()
            if compares:
                p.data.copy_(_values(tied, heard))
            if p.requires_grad:
                # All ranks add in the same order, so all get the same bits.
                total = _added(heard[rank][1] for rank in tied.names)
                _put(tied, total, guards)

    def refuse_in(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        """Raise `RuntimeError` if the criterion of `loss()` uses a tied parameter of this rank.

        Only a `step` adds the gradients of a criterion to the copies on other ranks.

        Args:
            loss: The loss.
            outputs: The outputs of the pipeline that require grad.
        """
        if not (self._tied and loss.requires_grad):
            return
        leaves = leaves_of([loss.grad_fn], ends=[y.grad_fn for y in outputs])
        for tied in self._tied:
            if any(leaf is tied.parameter() for leaf in leaves):
                raise RuntimeError(
                    f"the criterion of loss() uses a parameter that several ranks share: {tied}; "
                    "call step() instead, which adds the criterion's gradient to all copies"
                )

    def _told(
        self, tied: TiedParameter, guards: Sequence[StageGuards], io: BatchIO, *, compares: bool
    ) -> Flat:
        """Return what this rank tells other ranks about a parameter that they share.

        The result has three tensors: whether the parameter requires grad; the parameter's gradient;
        and the parameter's values, or `None` if the copies' values are not compared in this
        backward.
        """
        p = tied.parameter()
        needs = torch.tensor(p.requires_grad, device="cpu")
        gradients = [io.take_sum(p)]
        gradients += [stand_in.grad for stand_in in _stand_ins(p, guards)]
        gradient = _added(gradients)
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()  # messages have no sparse tensors
        return needs, gradient, p.detach() if compares else None


def _found(
    partitions: Iterable[nn.Module], placement: Iterable[int], own: int
) -> Iterator[TiedParameter]:
    """Yield the parameters that this rank's partitions share with partitions of other ranks."""
    uses: dict[nn.Parameter, list[tuple[int, str, nn.Module, str]]] = {}
    for partition, rank in zip(partitions, placement, strict=True):
        for path, module in partition.named_modules():
            for attribute, p in module._parameters.items():
                if p is not None:
                    name = f"{path}.{attribute}" if path else attribute
                    use = rank, name, module, attribute
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
    """Return a parameter's stand-ins: the tensors that replace it while this rank's stages run."""
    by_stage = [each.parameters.by_parameter for each in guards]
    return [stand_ins[p] for stand_ins in by_stage if p in stand_ins]


def _put(tied: TiedParameter, total: Tensor | None, guards: Sequence[StageGuards]) -> None:
    """Give the gradient `total` to one of a parameter's stand-ins, and no gradient to the others.

    Stand-ins are tensors that replace the parameter while this rank's stages run. Their gradients
    are added up later, so only one of them may have `total`.
    """
    stand_ins = _stand_ins(tied.parameter(), guards)
    if not stand_ins:
        raise RuntimeError(
            f"the copies {tied} are one parameter, but during the mini-batch, a copy or its layer "
            "was replaced, or a copy was frozen or unfrozen; change parameters only between "
            "mini-batches"
        )
    for stand_in in stand_ins:
        stand_in.grad = None
    stand_ins[0].grad = total


def _check_alike(tied: TiedParameter, heard: Mapping[int, Flat]) -> None:
    """Raise `RuntimeError` if a tied parameter requires grad on some of its ranks only.

    A tied parameter is one that layers on several ranks share, each with a copy.
    """
    needs = {bool(each[0]) for each in heard.values()}
    if len(needs) > 1:
        raise RuntimeError(
            f"the copies {tied} are one parameter, but only some of them require grad; freeze all "
            "copies, or none"
        )


def _values(tied: TiedParameter, heard: Mapping[int, Flat]) -> Tensor:
    """Return the values of a tied parameter on the first rank that has a copy.

    Raises:
        RuntimeError: If the values of another rank differ by more than rounding can explain.
    """
    first, *others = [heard[rank][2] for rank in tied.names]
    assert first is not None
    for other in others:
        assert other is not None
        if equal(first, other):  # also if the training has failed, and all values are NaN
            continue
        most = torch.finfo(first.dtype).eps ** 0.5 * first.abs().max()
        if not (other - first).abs().max() <= most:
            raise RuntimeError(
                f"the copies {tied} are one parameter, but their values differ; load the same "
                "state on these ranks, zero the gradients on all of them, clip by "
                "model.clip_grad_norm_, and give the optimizers of these ranks the same options, "
                "such as the learning rate and the weight decay"
            )
    return first


def _added(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Return the sum of those `parts` that are tensors, or `None` if none of them is."""
    total: Tensor | None = None
    for part in parts:
        if part is None:
            continue
        if total is None:
            total = part
        elif total.is_sparse:
            total = part + total  # a sparse tensor can be added to a dense one only in this order
        else:
            total = total + part
    return total
