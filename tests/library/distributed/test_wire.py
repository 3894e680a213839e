"""Messages arrive as sent, in any sequence, and no tensor is received into memory of another size.

Gloo is replaced by threads.py. What messages are about are plain values: they come back as they were.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchgpipe.distributed.wires.message import HEAD, SLOT, Message, described
from torchgpipe.distributed.wires.receiver import Receiver
from torchgpipe.distributed.wires.sender import Sender
from torchgpipe.distributed.wires.wire import WireAddress
from torchgpipe.plain import packed, unpacked

from .threads import Group, World

LARGE = SLOT // 4 + 1  # of these floats, a tensor does not fit into the slot
Wire = tuple[Sender, Receiver]


@pytest.fixture
def wire() -> Iterator[Wire]:
    def broken(error: BaseException) -> None:
        raise error

    world = World(2, None)
    here, there = (WireAddress(Group(world, "", rank), 1 - rank, 0, broken) for rank in (0, 1))  # type: ignore[arg-type]
    sender = Sender(here)
    yield sender, Receiver(there)
    sender.stop()
    sender.thread.join()


def assert_arrives(
    sender: Sender, receiver: Receiver, about: Any, tensors: list[Tensor | None]
) -> Message:
    sender.give(Message(3, about, tuple(tensors)))
    message = receiver.take()
    sender.settle()
    assert (message.serial, message.about) == (3, about)
    for x, y in zip(tensors, message.tensors, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            # PyTorch sums in another order if a tensor has other strides.
            strides = (x.contiguous() if x is SHARED else x).stride()
            assert torch.equal(x, y) and (x.dtype, strides) == (y.dtype, y.stride())
    return message


X = torch.arange(24.0)
SHARED = X.as_strided((5, 3), (2, 1))
PLACED: dict[str, tuple[Tensor, int]] = {  # tensor, number of its elements that are sent
    "columns first": (X.view(4, 6).t(), 24),
    "every other": (X[::2], 12),
    "part of each row": (X.view(4, 6)[:, 1:3], 8),
    "large, part of each row": (torch.rand(8, LARGE)[:, 1:], 8 * (LARGE - 1)),
    "large, columns first": (torch.rand(8, LARGE).t(), 8 * LARGE),
    "one number, repeated": (X[3:4].expand(5), 1),
    "rows, repeated": (X.view(4, 6)[:, None, 2:].expand(-1, 3, -1), 16),
    "one after another, shared": (SHARED, 15),
    "a number": (X[5], 1),
    "nothing": (X[:0], 0),
}
MESSAGES: dict[str, list[Tensor | None]] = {
    "none": [],
    "no tensor": [None, None],
    "of several types": [
        torch.arange(3),
        None,
        torch.rand(2).bfloat16(),
        torch.rand(2) > 0,
        torch.rand(2) * 1j,
    ],
    "large and small": [
        torch.rand(5),
        torch.rand(LARGE),
        None,
        torch.rand(6),
        torch.rand(LARGE + 1),
    ],
    "too much together": [torch.rand(LARGE // 2), torch.rand(LARGE // 2), torch.rand(LARGE // 2)],
    "just fits": [torch.rand(SLOT // 4 - 6)],
    **{name: [x] for name, (x, _) in PLACED.items()},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_arrives_as_it_was_sent(name: str, wire: Wire) -> None:
    sender, _ = wire
    for _ in range(3):
        for end in wire:
            end.begin()
        for about in ("short", "long" * SLOT):
            assert_arrives(*wire, about, MESSAGES[name])
    assert len(sender._numbers) == 2
    descriptions = sum(len(described(*each)) for each in sender._numbers)
    dense = sum(x.nbytes for x in MESSAGES[name] if x is not None)
    sent = 4 * PLACED[name][1] if name in PLACED else dense
    assert sender._group.world.bytes == descriptions + 6 * (HEAD.size + sent)  # type: ignore[attr-defined]


def test_nobody_waits_for_the_last_message(wire: Wire) -> None:
    """Gloo never ends this wait if the connection is closed already when it begins to send."""
    sender, _ = wire
    sender.give_last(Message(0, None, ()))
    sender.stop()
    sender.thread.join(5)
    assert not sender.thread.is_alive()


def test_any_messages_arrive_in_any_order(wire: Wire) -> None:
    draw = random.Random(0)
    for _ in range(50):
        kinds = draw.sample([*MESSAGES], 3)
        for _ in range(6):
            for end in draw.sample(wire, 2):
                end.begin()
            for _ in range(draw.randrange(4)):
                assert_arrives(*wire, draw.choice(["a", "b"]), MESSAGES[draw.choice(kinds)])


def test_a_large_tensor_is_expected_where_one_was_before(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, sizes, posted = Group.recv, [SLOT, SLOT], list[Any]()

    def noted(group: Group, tensors: list[Tensor], *given: Any) -> Any:
        sizes.append(tensors[0].numel())
        return receive(group, tensors, *given)

    monkeypatch.setattr(Group, "recv", noted)
    for _ in range(2):
        for end in wire:
            end.begin()
        for count in (LARGE, LARGE, 7):
            posted.append(sizes.copy())
            sizes.clear()
            assert_arrives(*wire, "", [torch.rand(count)])
    large = 4 * LARGE
    assert posted == [[SLOT, SLOT], [large], *[[SLOT, large]] * 3, [SLOT]]


def test_a_tensor_that_was_changed_before_it_was_sent_is_noticed(wire: Wire) -> None:
    sender, receiver = wire
    x = torch.rand(LARGE)
    sender.give(Message(1, "", (x,)))
    x.add_(1)
    receiver.take()
    with pytest.raises(
        RuntimeError, match="input of partition 1 was changed in place before it was sent"
    ):
        sender.settle()
    with pytest.raises(
        TypeError, match=r"only dense tensors travel .*, but a partition returned a tensor of"
    ):
        sender.give(Message(1, "", (torch.eye(3).to_sparse(),)))


def test_nothing_that_comes_is_run(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = wire
    pickled = b"cos\nmkdir\nV%s/made\n\x85R." % bytes(tmp_path)
    for content in (pickled, pickled + b" " * SLOT, b"[]", b"\xff", b"[" * 9999):
        described = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        monkeypatch.setattr(
            "torchgpipe.distributed.wires.sender.described", lambda *_, now=described: now
        )
        sender.give(Message(1, content, ()))
        with pytest.raises(
            RuntimeError, match="rank 0 is another program, or another version of this one"
        ):
            receiver.take()
    assert not [*tmp_path.iterdir()]


VALUES: dict[str, Any] = {
    "numbers": [0, -1, 10**30, True, -0.0, 1e-300, inf, -inf, nan, 1j, complex(nan, -0.0), None],
    "text": ["", "ü\n\x00", b"", b"\xff\x00", "tuple", '{"tuple": []}'],
    "within each other": {"tuple": ({1: [(), {}], (2, "a"): {b"4"}},), None: [set(), [[]]]},
}
ROUND: list[Any] = []
ROUND.append(ROUND)
OTHERS = [
    torch.ones(1),
    torch.Size([2]),
    torch.float,
    int,
    defaultdict(int),
    "a".join,
    ROUND,
    10**5000,
    ...,
    object(),
]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_come_back(value: Any) -> None:
    assert repr(unpacked(packed(value))) == repr(value)
    assert len({len(packed("a" * n)) for n in range(500)}) < 9


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_others_are_refused(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"ranks tell each other only .*, not a|cannot be told to other ranks"
    ):
        packed([{"a": (value,)}])
