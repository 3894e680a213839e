"""Test that messages between ranks arrive unchanged, and in buffers of the right size.

A message has tensors and plain values. threads.py simulates Gloo, which sends the messages.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from torchgpipe.distributed.channels.channel import ChannelAddress
from torchgpipe.distributed.channels.message import HEAD, SLOT, Message, described
from torchgpipe.distributed.channels.receiver import Receiver
from torchgpipe.distributed.channels.sender import Sender
from torchgpipe.plain import packed, unpacked

from .threads import Group, World

LARGE = SLOT // 4 + 1  # so many floats do not fit into the slot for small tensors
Channel = tuple[Sender, Receiver]


@pytest.fixture
def channel() -> Iterator[Channel]:
    def broken(error: BaseException) -> None:
        raise error

    world: Any = World(2, None)
    groups: list[Any] = [Group(world, "", own) for own in range(2)]
    here = ChannelAddress(groups[0], 1, 0, broken)
    there = ChannelAddress(groups[1], 0, 0, broken)
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
    assert message.serial == 3
    assert message.about == about
    for x, y in zip(tensors, message.tensors, strict=True):
        if x is None or y is None:
            assert x is y
            continue
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
        # The strides have to be equal, because PyTorch's order of summation depends on the strides.
        expected = x.contiguous() if x is SHARED else x
        assert y.stride() == expected.stride()
    return message


X = torch.arange(24.0)
MATRIX = X.view(4, 6)
SHARED = X.as_strided((5, 3), (2, 1))
LARGE_ROWS = torch.rand(8, LARGE)
# A tensor, and the number of its elements that are sent.
PLACED: dict[str, tuple[Tensor, int]] = {
    "columns first": (MATRIX.t(), 24),
    "every other": (X[::2], 12),
    "part of each row": (MATRIX[:, 1:3], 8),
    "large, part of each row": (LARGE_ROWS[:, 1:], 8 * (LARGE - 1)),
    "large, columns first": (LARGE_ROWS.t(), 8 * LARGE),
    "one number, repeated": (X[3:4].expand(5), 1),
    "rows, repeated": (MATRIX[:, None, 2:].expand(-1, 3, -1), 16),
    "one after another, shared": (SHARED, 15),
    "a number": (X[5], 1),
    "nothing": (X[:0], 0),
}
TWO = torch.rand(2)
HALF = torch.rand(LARGE // 2)
MESSAGES: dict[str, list[Tensor | None]] = {
    "none": [],
    "no tensor": [None, None],
    "of several types": [torch.arange(3), None, TWO.bfloat16(), TWO > 0, TWO * 1j],
    "large and small": [torch.rand(n) if n else None for n in (5, LARGE, 0, 6, LARGE + 1)],
    "too much together": [HALF, HALF.clone(), HALF.clone()],
    "just fits": [torch.rand(SLOT // 4 - 6)],
}
MESSAGES |= {name: [x] for name, (x, _) in PLACED.items()}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_arrives_as_it_was_sent(name: str, channel: Channel) -> None:
    sender, _ = channel
    tensors = MESSAGES[name]
    for _ in range(3):
        for end in channel:
            end.begin()
        for about in ("short", "long" * SLOT):
            assert_arrives(*channel, about, tensors)

    assert len(sender._numbers) == 2
    descriptions = sum(len(described(*each)) for each in sender._numbers)
    if name in PLACED:
        _, elements = PLACED[name]
        content = 4 * elements
    else:
        content = sum(x.nbytes for x in tensors if x is not None)
    group: Any = sender._group
    assert group.world.bytes == descriptions + 6 * (HEAD.size + content)


def test_nobody_waits_for_the_last_message(channel: Channel) -> None:
    """Check that the sender's thread ends even if nobody receives its last message.

    If the thread waited until the message was received, Gloo could make it wait for ever.
    """
    sender, _ = channel
    sender.give_last(Message(0, None, ()))
    sender.stop()
    sender.thread.join(5)
    assert not sender.thread.is_alive()


def test_any_messages_arrive_in_any_order(channel: Channel) -> None:
    draw = random.Random(0)
    for _ in range(50):
        kinds = draw.sample([*MESSAGES], 3)
        for _ in range(6):
            for end in draw.sample(channel, 2):
                end.begin()
            for _ in range(draw.randrange(4)):
                about = draw.choice(["a", "b"])
                assert_arrives(*channel, about, MESSAGES[draw.choice(kinds)])


def test_a_large_tensor_is_expected_where_one_was_before(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Group.recv
    sizes = [SLOT, SLOT]
    posted: list[list[int]] = []

    def noted(group: Group, tensors: list[Tensor], *given: Any) -> Any:
        sizes.append(tensors[0].numel())
        return receive(group, tensors, *given)

    monkeypatch.setattr(Group, "recv", noted)
    for _ in range(2):
        for end in channel:
            end.begin()
        for count in (LARGE, LARGE, 7):
            posted.append(sizes.copy())
            sizes.clear()
            assert_arrives(*channel, "", [torch.rand(count)])
    large = 4 * LARGE
    assert posted == [[SLOT, SLOT], [large], *[[SLOT, large]] * 3, [SLOT]]


def test_a_tensor_that_was_changed_before_it_was_sent_is_noticed(channel: Channel) -> None:
    sender, receiver = channel
    x = torch.rand(LARGE)
    sender.give(Message(1, "", (x,)))
    x.add_(1)
    receiver.take()
    changed = "a tensor for rank 1 was changed in place before it was sent"
    with pytest.raises(RuntimeError, match=changed):
        sender.settle()
    sparse = torch.eye(3).to_sparse()
    not_dense = r"only dense tensors can be sent .*, but a partition returned a tensor of"
    with pytest.raises(TypeError, match=not_dense):
        sender.give(Message(1, "", (sparse,)))


def test_nothing_that_comes_is_run(
    channel: Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = channel
    pickled = b"cos\nmkdir\nV%s/made\n\x85R." % bytes(tmp_path)
    another_program = "rank 0 runs another program, or another version of this program"
    for content in (pickled, pickled + b" " * SLOT, b"[]", b"\xff", b"[" * 9999):
        description = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        described = Mock(return_value=description)
        monkeypatch.setattr("torchgpipe.distributed.channels.sender.described", described)
        sender.give(Message(1, content, ()))
        with pytest.raises(RuntimeError, match=another_program):
            receiver.take()
    assert [*tmp_path.iterdir()] == []


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
    lengths = {len(packed("a" * n)) for n in range(500)}
    assert len(lengths) < 9


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_others_are_refused(value: Any) -> None:
    refusal = r"ranks tell each other only .*, not a|cannot be told to other ranks"
    with pytest.raises(TypeError, match=refusal):
        packed([{"a": (value,)}])
