"""Test stages, which run the layers of a partition: their locks, modes and stand-ins.

A stand-in is the tensor that tasks use in place of a parameter, so that its gradient adds up over a
mini-batch. What layers see of a stage is tested in tests/behaviours.
"""

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.modules import Swap, Swapped
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.guards.parameters import StandInParameters
from torchgpipe.task.guards.stand_ins import StandInsForRun
from torchgpipe.task.stage import Stage
from torchgpipe.task.turns import in_its_turn, outer_turns
from torchgpipe.tensors._autograd import accumulator_of
from torchgpipe.tensors.checkpoint import CheckpointPhase, is_checkpointing, is_recomputing

LAYER, OTHER, THIRD = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
RELU = nn.ReLU(inplace=True)
BOTH = nn.Sequential(LAYER, OTHER, nn.Linear(2, 2))
PIPELINE = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])

# The layers of two partitions, and whether the partitions have to run one at a time.
TOGETHER: dict[str, tuple[list[nn.Module], list[nn.Module], bool]] = {
    "nothing in common": ([nn.Linear(2, 2)], [nn.Linear(2, 2)], False),
    "a layer in common": ([LAYER], [nn.ReLU(), nn.Sequential(LAYER)], True),
    "a layer in common with each of two": ([LAYER, OTHER], [OTHER], True),
    "a layer in common with one that has": ([BOTH], [BOTH[2], THIRD], True),
    "an activation in common": ([nn.Linear(2, 2), RELU], [RELU], False),
    "a pipeline and its layers": ([PIPELINE], list(PIPELINE), False),
}


@pytest.mark.parametrize("ours, theirs, waits", TOGETHER.values(), ids=TOGETHER)
def test_which_partitions_run_one_at_a_time(
    ours: list[nn.Module], theirs: list[nn.Module], waits: bool
) -> None:
    # Some of these layers also belong to an earlier partition, which has its own lock.
    stages = []
    for layers in ([LAYER], [OTHER], [THIRD], ours, theirs):
        stage = Stage(0, nn.Sequential(*layers), DEVICES[0])
        assert stage.look()
        stages.append(stage)

    *_, one, other = stages
    one.look()  # as each mini-batch does
    in_common = locks_of(one) & locks_of(other)
    assert bool(in_common) == waits
    # A stage with several locks takes them in the same order as all other stages.
    for lock in locks_of(one) | locks_of(other):
        assert not hasattr(lock, "_locks")
    with one.lock, one.lock, other.lock:
        pass


@pytest.mark.parametrize("keep", [False, True])
def test_another_balance_lets_partitions_run_at_the_same_time(keep: bool) -> None:
    """Check that partitions without a common layer have no common lock.

    Earlier pipelines of the same layers have other balances. As long as such a pipeline exists, its
    partitions have locks in common with those of the new pipeline that have the same layers.
    """
    layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    earlier = [GPipe(layers, balance, devices=["cpu"] * len(balance)) for balance in ([4], [3, 1])]
    if not keep:
        earlier.clear()
        gc.collect()
    first, second = GPipe(layers, [1, 3], devices=["cpu"] * 2)._stages
    assert not locks_of(first) & locks_of(second)
    for stage in [*earlier[0]._stages, *earlier[1]._stages] if keep else []:
        assert not stage.look(), "the modules are the same, but perhaps not their locks"
    for whole, three, last in [[*earlier[0]._stages, *earlier[1]._stages]] if keep else []:
        assert locks_of(whole) == locks_of(first) | locks_of(second)
        assert locks_of(three) & locks_of(first)
        assert locks_of(three) & locks_of(second)
        assert locks_of(last) <= locks_of(second)
        assert not locks_of(three) & locks_of(last)


def locks_of(stage: Stage) -> set[Any]:
    return {*getattr(stage.lock, "_locks", [stage.lock])}


def test_in_anomaly_mode_the_nodes_of_stand_ins_are_made_before_threads_run() -> None:
    """Check that autograd's nodes that accumulate gradients are made before threads run.

    In anomaly mode, two threads that create the same node at the same time can deadlock.
    """
    assert StandInParameters(0, [LAYER])._nodes == []
    with torch.autograd.set_detect_anomaly(True):
        parameters = StandInParameters(0, [LAYER])
    expected = [accumulator_of(x) for x in parameters.by_parameter.values()]
    assert len(expected) == 2
    for node, accumulator in zip(parameters._nodes, expected, strict=True):
        assert node is accumulator


class Place(dict[str, Any]):
    """A dictionary that raises KeyboardInterrupt in an assignment to an item.

    The assignment number `count` raises it, counted over all such dictionaries. So tests interrupt
    the library while it exchanges the parameters or buffers of layers.
    """

    count = 0

    def __setitem__(self, key: str, value: object) -> None:
        Place.count -= 1
        if Place.count == 0:
            raise KeyboardInterrupt
        super().__setitem__(key, value)


@pytest.mark.parametrize("count", range(1, 7))
def test_an_interrupt_leaves_nothing_exchanged(count: int) -> None:
    places = [Place(held="parameter") for _ in range(3)]
    swaps = [Swap(place, "held", "leaf") for place in places]
    Place.count = count
    with pytest.raises(KeyboardInterrupt), Swapped(swaps):
        assert [place["held"] for place in places] == ["leaf"] * 3
    gc.collect()
    assert [place["held"] for place in places] == ["parameter"] * 3


def test_stand_ins_are_exchanged_with_whatever_a_layer_has_and_back_with_what_it_had() -> None:
    layer = nn.Linear(2, 2)
    before = dict(layer._parameters)
    with Swapped(StandInParameters(0, [layer]).swaps):
        inner = dict(layer._parameters)
        # A pipeline that is called within its own layers does this.
        with Swapped(StandInParameters(0, [layer]).swaps):
            layer.register_parameter("more", nn.Parameter(torch.zeros(2)))
        assert layer._parameters == inner
        assert layer.weight is not before["weight"]
    assert layer._parameters == before


@pytest.mark.parametrize("engine", ["workers", "graph"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_an_rnn_does_not_make_its_list_of_weights_anew(
    engine: Any, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that an RNN finds stand-ins in the list that it keeps of its weights.

    Otherwise, it would make the list anew in each forward and, on a GPU, move the weights.
    """

    class Last(nn.Module):
        def forward(self, found: Any) -> torch.Tensor:
            output: torch.Tensor = found[0]
            return output

    rnn = nn.LSTM(2, 2, 2, batch_first=True)
    layers = nn.Sequential(nn.Linear(2, 2), rnn, Last())
    model = GPipe(
        layers, [1, 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint, engine=engine
    )
    monkeypatch.setattr(nn.LSTM, "_init_flat_weights", lambda self: pytest.fail("made anew"))
    x = torch.randn(4, 3, 2)
    for _ in range(2):
        expected = torch.autograd.grad(layers(x).square().sum(), [*layers.parameters()])
        found = torch.autograd.grad(model(x).square().sum(), [*layers.parameters()])
        torch.testing.assert_close(found, expected)
        parameters = dict(rnn.named_parameters())
        kept = zip(rnn._flat_weights, rnn._flat_weights_names, strict=True)
        assert all(weight is parameters[name] for weight, name in kept)


def test_dropout_of_cudnn_is_not_recomputed() -> None:
    layers = nn.Sequential(nn.LSTM(2, 2, 2, dropout=0.5, batch_first=True))
    model = GPipe(layers, [1], devices=["cpu"], chunks=2, checkpoint="always")
    for stage in model._stages:
        stage.runs_later = True
    with pytest.raises(RuntimeError, match=r"LSTM has dropout=0\.5, whose masks cuDNN draws"):
        model(torch.randn(4, 3, 2))


def test_the_last_thread_to_leave_takes_changes_back() -> None:
    """Check that the last of two threads to leave a context undoes its changes of a layer.

    The calling thread can leave the context early: after a second Ctrl-C, another thread may still
    run its tasks.
    """
    place = {"held": "parameter"}
    swap = Swap(place, "held", "stand-in")
    stand_ins = StandInsForRun([(threading.Lock(), Swapped([swap]))])
    inside = threading.Event()
    leave = threading.Event()

    def program() -> None:
        with stand_ins:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=program)
    with stand_ins:
        thread.start()
        assert inside.wait(60)
    assert place == {"held": "stand-in"}
    leave.set()
    thread.join()
    assert place == {"held": "parameter"}


def test_runs_through_the_same_layers_take_turns_and_a_run_within_a_run_does_not_wait() -> None:
    layers = nn.Sequential(nn.Linear(2, 2))
    order: list[str] = []
    turn = GPipe(layers, [1], devices=["cpu"])._stages[0].turn
    other = GPipe(layers, [1], devices=["cpu"])._stages[0].turn
    thread = threading.Thread(target=in_its_turn, args=(other, lambda: order.append("other")))

    def run() -> bool:
        thread.start()
        assert not outer_turns()
        assert in_its_turn(turn, outer_turns)
        time.sleep(0.1)  # time for the other thread to run, if it does not wait
        order.append("first")
        return bool(outer_turns())

    assert not in_its_turn(turn, run)
    thread.join()
    assert order == ["first", "other"]
    assert not outer_turns()


# Devices that are compared with each other, but not used.
DEVICES = [torch.device("cpu"), torch.device("meta"), torch.device("cuda")]


@pytest.mark.parametrize("which", ["checkpointing", "recomputing"])
def test_a_pipeline_among_the_layers_of_another_knows_its_pass(which: str) -> None:
    with CheckpointPhase(**{which: True}):
        ambient = AmbientModes(DEVICES)
        expected = (is_checkpointing(), is_recomputing())
    assert expected != (False, False)
    with ambient.entered():
        with CheckpointPhase(checkpointing=True):
            assert is_checkpointing()
        assert (is_checkpointing(), is_recomputing()) == expected
    assert not is_checkpointing()
    assert not is_recomputing()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_autocast_of_each_kind_of_device_is_seen(kind: str) -> None:
    assert not AmbientModes([torch.device(kind)]).casts
    torch.set_autocast_enabled(kind, True)  # a context would need the device
    try:
        assert AmbientModes([torch.device("meta"), torch.device(kind)]).casts
    finally:
        torch.set_autocast_enabled(kind, False)


def test_autocast_keeps_no_casts_of_weights_in_other_threads_and_recomputations() -> None:
    """Check that autocast does not cache casts of weights in other threads and in recomputations.

    Two tasks that used the same cached cast would share a part of their autograd graphs.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = AmbientModes(DEVICES)
        for context in (ambient.again, ambient.entered):
            with context():
                assert not torch.is_autocast_cache_enabled()
            assert torch.is_autocast_cache_enabled()
