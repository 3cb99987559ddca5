"""Messages between stages: how tensors lie in them, and who waits for what."""

from collections import deque
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from convoy.errors import ConfigError
from convoy.inner.arithmetic import Arithmetic
from convoy.models.blocks import walk_units
from convoy.models.zoo import build_model
from convoy.outer.membership import Group
from convoy.pipeline.forms import Form, form_of, forms_of
from convoy.pipeline.traffic import Channel

_CPU = torch.device("cpu")


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("shape", "channels_last"),
    [((3, 4, 5), False), ((3, 4, 5), True), ((7,), False), ((2, 6), False), ((1, 4, 5), True)],
)
def test_a_row_is_seen_as_the_tensor_that_was_put_there(
    shape: tuple[int, ...], channels_last: bool, samples: int
) -> None:
    form = Form(shape, torch.float32, channels_last)
    tensor = torch.randn(samples, *shape)
    row = torch.full((form.numel(samples),), torch.nan)
    form.view(row, samples).copy_(tensor)
    assert not row.isnan().any()
    found = form.view(row, samples)
    assert torch.equal(found, tensor)
    assert found.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert found.is_contiguous(memory_format=layout)


def test_images_by_channel_lie_in_a_row_as_they_lie_in_memory() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    form = form_of(tensor)
    assert form == Form((3, 4, 5), torch.float32, True)
    row = torch.empty(form.numel(2))
    form.view(row, 2).copy_(tensor)
    assert torch.equal(row, tensor.permute(0, 2, 3, 1).flatten())


@pytest.mark.parametrize(
    ("tensor", "form"),
    [
        (torch.zeros(2, 3, 4, 5), Form((3, 4, 5), torch.float32, False)),
        (torch.zeros(2, 7, dtype=torch.float64), Form((7,), torch.float64, False)),
        (torch.zeros(7, 2).t(), Form((7,), torch.float32, False)),
        (torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16), Form((3, 4, 5), torch.bfloat16, False)),
    ],
)
def test_the_form_of_a_batch_is_that_of_a_sample(tensor: Tensor, form: Form) -> None:
    assert form_of(tensor) == form


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["lenet5", "resnet20", "vgg16-bn"])
def test_what_each_unit_sends_in_training_has_the_form_that_was_foreseen(
    name: str, layout: str, precision: str
) -> None:
    shape = (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    arithmetic = Arithmetic(_CPU, precision, layout)
    model = arithmetic.place(build_model(name, shape, 10, seed=0))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    forms = forms_of(model.train(), shape, arithmetic)
    assert model.training
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())
    assert forms[-1] == Form((10,), forms[-1].dtype, False)
    assert any(form.channels_last for form in forms) == (layout == "channels_last")
    wire = torch.bfloat16 if precision == "bf16" else arithmetic.dtype
    assert {form.dtype for form in forms} == {wire}
    x = torch.randn(3, *shape, dtype=arithmetic.dtype).to(memory_format=arithmetic.memory_format)
    units = walk_units(model)
    assert len(units) == len(forms)
    for (unit_name, unit), form in zip(units, forms, strict=True):
        with arithmetic.autocast():
            x = unit(x)
        row = torch.empty(form.numel(len(x)), dtype=form.dtype)
        sent = form.view(row, len(x)).copy_(x)
        assert form_of(x) == form, unit_name
        assert torch.equal(sent, x)
        assert sent.stride() == x.stride(), unit_name


def test_a_network_under_test_stays_so() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).eval()
    forms_of(model, (3,), Arithmetic(_CPU))
    assert not model.training


# ---------------------------------------------------------------- channels


@dataclass(eq=False)
class FakeWork:
    """An exchange that is under way until it is said to be done."""

    row: Tensor
    done: bool = False

    def is_completed(self) -> bool:
        return self.done


@dataclass(eq=False)
class FakeGroup:
    """Carries messages in memory to one peer, and notes who waited for what."""

    on_the_way: deque[FakeWork] = field(default_factory=deque)
    sends: list[FakeWork] = field(default_factory=list)
    receives: list[FakeWork] = field(default_factory=list)
    waited: list[FakeWork] = field(default_factory=list)
    peers: set[int] = field(default_factory=set)

    def start_send(self, row: Tensor, peer: int) -> FakeWork:
        self.peers.add(peer)
        self.sends.append(FakeWork(row))
        self.on_the_way.append(self.sends[-1])
        return self.sends[-1]

    def start_receive(self, row: Tensor, peer: int) -> FakeWork:
        self.peers.add(peer)
        self.receives.append(FakeWork(row))
        return self.receives[-1]

    def wait(self, work: FakeWork) -> None:
        self.waited.append(work)
        if work in self.receives:
            sent = self.on_the_way.popleft()
            assert sent.row.shape == work.row.shape, "a message of another length was expected"
            assert sent.row.dtype == work.row.dtype
            work.row.copy_(sent.row)
            sent.done = True
        work.done = True


def _channel(form: Form, numbers: int) -> tuple[Channel, FakeGroup]:
    group = FakeGroup()
    return Channel(cast(Group, group), 5, form, numbers, _CPU, _CPU), group


_ROW_OF_3 = Form((3,), torch.float32, False)


@pytest.mark.parametrize(
    ("form", "numbers"),
    [
        (_ROW_OF_3, [1.0]),
        (Form((3, 4, 5), torch.float32, True), [0.0, 0.25, 3.5]),
        (Form((3, 4, 5), torch.float64, False), [1.0, 1e-9]),
        (Form((3, 4, 5), torch.bfloat16, True), [1.0, 0.5, 0.0]),
    ],
)
def test_tensors_and_numbers_arrive_in_order(form: Form, numbers: list[float]) -> None:
    channel, group = _channel(form, len(numbers))
    sent = [torch.randn(samples, *form.shape).to(form.dtype) for samples in (4, 4, 2)]
    for count, tensor in enumerate(sent):
        channel.send(tensor, [number * (count + 1) for number in numbers], at_most=9)
        tensor_of_sender = tensor.clone()
        tensor.zero_()  # what was sent does not lie where the sender goes on working
        sent[count] = tensor_of_sender
    for count, tensor in enumerate(sent):
        found, told = channel.receive(len(tensor))
        assert torch.equal(found, tensor)
        assert found.dtype == form.dtype
        assert form_of(found).channels_last == form.channels_last
        assert told == pytest.approx([number * (count + 1) for number in numbers], rel=2**-8)
    assert group.peers == {5}


def test_a_gradient_of_another_layout_arrives_as_well() -> None:
    channel, _ = _channel(Form((3, 4, 5), torch.float32, True), 1)
    tensor = torch.randn(2, 3, 4, 5)
    channel.send(tensor, [0.0], at_most=1)
    found, _ = channel.receive(2)
    assert torch.equal(found, tensor)


def test_bfloat16_tells_flags_exactly_and_times_nearly() -> None:
    channel, _ = _channel(Form((3,), torch.bfloat16, False), 3)
    channel.send(torch.zeros(1, 3, dtype=torch.bfloat16), [1.0, 0.0, 0.0123], at_most=1)
    _, told = channel.receive(1)
    assert told[:2] == [1.0, 0.0]
    assert told[2] == pytest.approx(0.0123, rel=2**-8)


def test_to_expect_a_message_twice_is_to_expect_it_once() -> None:
    channel, group = _channel(_ROW_OF_3, 1)
    channel.expect(2)
    channel.expect(2)
    assert len(group.receives) == 1
    assert group.waited == []  # it comes beside other work
    channel.send(torch.ones(2, 3), [7.0], at_most=9)
    found, told = channel.receive(2)
    assert torch.equal(found, torch.ones(2, 3))
    assert told == [7.0]
    assert len(group.receives) == 1
    channel.expect(1)
    assert len(group.receives) == 2
    assert group.receives[1].row.numel() == 3 + 1


def test_what_arrived_is_not_written_over_by_the_next_message() -> None:
    channel, _ = _channel(_ROW_OF_3, 1)
    for value in (1.0, 2.0):
        channel.send(torch.full((2, 3), value), [value], at_most=9)
    first, _ = channel.receive(2)
    second, _ = channel.receive(2)
    assert torch.equal(first, torch.full((2, 3), 1.0))
    assert torch.equal(second, torch.full((2, 3), 2.0))


def test_a_sender_waits_for_the_oldest_only_where_too_many_are_on_their_way() -> None:
    channel, group = _channel(_ROW_OF_3, 1)
    for _ in range(3):
        channel.send(torch.zeros(2, 3), [0.0], at_most=3)
    assert group.waited == []
    channel.send(torch.zeros(2, 3), [0.0], at_most=3)
    assert group.waited == group.sends[:1]
    channel.send(torch.zeros(2, 3), [0.0], at_most=2)
    assert group.waited == group.sends[:3]


def test_messages_that_have_gone_out_do_not_count() -> None:
    channel, group = _channel(_ROW_OF_3, 1)
    for _ in range(2):
        channel.send(torch.zeros(2, 3), [0.0], at_most=2)
        group.sends[-1].done = True
    channel.send(torch.zeros(2, 3), [0.0], at_most=2)
    assert group.waited == group.sends[:2]  # which they no longer had to be waited for
    channel.send(torch.zeros(2, 3), [0.0], at_most=2)
    assert len(group.waited) == 2


def test_to_flush_is_to_wait_for_everything_once() -> None:
    channel, group = _channel(_ROW_OF_3, 1)
    for _ in range(3):
        channel.send(torch.zeros(2, 3), [0.0], at_most=9)
    channel.flush()
    assert group.waited == group.sends
    channel.flush()
    assert len(group.waited) == 3


def test_a_block_that_writes_over_its_input_is_told() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(inplace=True)), _Overwriting(), nn.Conv2d(4, 4, 3)
    )
    with pytest.raises(ConfigError, match="'2' writes over its input"):
        forms_of(model, (3, 8, 8), Arithmetic(torch.device("cpu"), "fp32"))


class _Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.relu_())
        return y
