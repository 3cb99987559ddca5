"""A job's state as bytes: what went in comes out, bit for bit; what is damaged does not."""

import io
import json
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from convoy.errors import CheckpointError
from convoy.outer.state import as_tensor, pack, unpack
from convoy.storage.checkpoint import Checkpoint

# Protocol 0 for os.system("touch canary"): whoever unpickles this runs it.
PICKLE = b"cos\nsystem\n(S'touch canary'\ntR."
HEADER: dict[str, Any] = {"step": 1, "progress": {}, "identity": {}, "score": None}


def _checkpoint(**changes: Any) -> Checkpoint:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, 2, 2, generator=generator)
    values: dict[str, Any] = {
        "step": 12,
        "model": {
            "conv.weight": weight,
            "bn.running_var": torch.rand(4, generator=generator),
            "bn.num_batches_tracked": torch.tensor(7),
        },
        "momentum": {"conv.weight": weight * 0.1},
        "progress": {"epoch": 1, "updates": 12, "history": [{"loss": 0.1 + 0.2, "name": "ä"}]},
        "identity": {"model": "lenet5", "seed": 0},
        "score": 0.875,
    }
    return Checkpoint(**{**values, **changes})


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def _assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert other[name].dtype == tensor.dtype
        assert other[name].shape == tensor.shape
        assert _bits(other[name]) == _bits(tensor)


def _crafted(convoy: str, tensors: dict[str, Tensor] | None = None) -> bytes:
    plain = tensors or {"model/weight": torch.zeros(2)}
    return safetensors.torch.save(plain, metadata={"convoy": convoy})


def _with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# ---------------------------------------------------------------- round trips


def test_what_went_in_comes_out() -> None:
    before = _checkpoint()
    after = unpack(pack(before))
    _assert_same(before.model, after.model)
    _assert_same(before.momentum, after.momentum)
    assert after.step == before.step
    assert after.progress == before.progress
    assert after.identity == before.identity
    assert after.score == before.score


def test_a_checkpoint_without_score_momentum_or_model_comes_out_as_it_was() -> None:
    after = unpack(pack(_checkpoint(score=None, momentum={}, model={}, step=0)))
    assert (after.score, after.momentum, after.model, after.step) == (None, {}, {}, 0)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
    ],
)
def test_every_bit_pattern_of_a_type_comes_out(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (3 * 5 * 8,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(5, 3, -1)  # among them NaNs with payloads and subnormals
    after = unpack(pack(_checkpoint(model={"any": tensor}, momentum={"any": tensor})))
    _assert_same({"any": tensor}, after.model)
    _assert_same({"any": tensor}, after.momentum)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-45])
def test_special_numbers_come_out(value: float) -> None:
    tensor = torch.tensor([value, 1.0])
    _assert_same({"x": tensor}, unpack(pack(_checkpoint(model={"x": tensor}))).model)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1, 1, 1, 1)])
def test_odd_shapes_come_out(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 3.5)
    _assert_same({"x": tensor}, unpack(pack(_checkpoint(model={"x": tensor}))).model)


def test_a_channels_last_tensor_comes_out_with_its_values_in_place() -> None:
    tensor = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert not tensor.is_contiguous()
    after = unpack(pack(_checkpoint(model={"x": tensor}))).model["x"]
    assert torch.equal(after, tensor)
    assert after.is_contiguous()


def test_part_of_a_larger_tensor_comes_out_alone() -> None:
    whole = torch.arange(10_000.0)
    block = pack(_checkpoint(model={"x": whole[10:14], "t": whole.reshape(100, 100).T}))
    after = unpack(block).model
    assert torch.equal(after["x"], torch.arange(10.0, 14.0))
    assert torch.equal(after["t"], whole.reshape(100, 100).T)


def test_tied_weights_come_out_under_both_names() -> None:
    weight = torch.randn(3, 3)
    after = unpack(pack(_checkpoint(model={"one": weight, "two": weight, "row": weight[0]})))
    _assert_same({"one": weight, "two": weight, "row": weight[0]}, after.model)


def test_a_parameter_that_learns_comes_out_as_a_plain_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    after = unpack(pack(_checkpoint(model={"x": parameter}))).model["x"]
    assert not after.requires_grad


def test_names_that_look_like_the_other_part_stay_where_they_belong() -> None:
    model = {"momentum/x": torch.zeros(1), "model/x": torch.ones(1), "": torch.ones(2)}
    momentum = {"model/x": torch.ones(3), "x": torch.ones(4)}
    after = unpack(pack(_checkpoint(model=model, momentum=momentum)))
    _assert_same(model, after.model)
    _assert_same(momentum, after.momentum)


def test_what_comes_out_can_be_written_to_and_leaves_the_source_alone() -> None:
    before = _checkpoint()
    block = pack(before)
    after = unpack(block)
    after.model["conv.weight"].zero_()
    assert before.model["conv.weight"].abs().sum() > 0
    assert unpack(block).model["conv.weight"].abs().sum() > 0


def test_the_same_state_makes_the_same_block() -> None:
    assert pack(_checkpoint()) == pack(unpack(pack(_checkpoint())))


def test_a_block_travels_as_a_tensor_of_bytes() -> None:
    block = pack(_checkpoint())
    tensor = as_tensor(block)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (len(block),))
    assert tensor.numpy().tobytes() == block
    tensor[0] ^= 1  # a copy: the block itself stays
    assert tensor.numpy().tobytes() != block


# ---------------------------------------------------------------- damage


def test_a_block_cut_short_anywhere_is_refused() -> None:
    block = pack(_checkpoint())
    for length in range(len(block)):
        with pytest.raises(CheckpointError, match="the state that was received is damaged"):
            unpack(block[:length])


def test_a_block_with_something_behind_it_is_refused() -> None:
    with pytest.raises(CheckpointError):
        unpack(pack(_checkpoint()) + b"\0")


def _is_refused_or_read(block: bytes) -> bool:
    """Tell whether a block is refused; any other exception than ours passes through."""
    try:
        unpack(block)
    except CheckpointError:
        return True
    return False


def test_a_flipped_byte_in_the_header_raises_nothing_else() -> None:
    block = pack(_checkpoint())
    end = 8 + int.from_bytes(block[:8], "little")
    refused = 0
    for place in range(end):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            damaged = bytearray(block)
            damaged[place] ^= flip
            refused += _is_refused_or_read(bytes(damaged))
    assert refused > 2 * end  # a changed letter in a name is all that can be read


@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(b'0159eE-+.,:"[]{}\\FBIU ')),
        min_size=1,
        max_size=8,
    )
)
def test_a_header_with_other_signs_raises_nothing_else(changes: list[tuple[float, int]]) -> None:
    damaged = bytearray(pack(_checkpoint()))
    length = int.from_bytes(damaged[:8], "little")
    for place, sign in changes:
        damaged[8 + int(place * length)] = sign
    _is_refused_or_read(bytes(damaged))


@given(block=st.binary(max_size=200))
def test_noise_is_refused(block: bytes) -> None:
    with pytest.raises(CheckpointError):
        unpack(block)


@pytest.mark.parametrize("length", [2**24 + 1, 90 << 20, 2**31, 2**40, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("rest", [b"", b"{}", b"{" * 1000])
def test_a_header_that_claims_to_be_huge_is_refused_and_not_allocated(
    length: int, rest: bytes
) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        unpack(length.to_bytes(8, "little") + rest)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 << 10


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([2**40], [0, 2**42]),
        ([2**62, 2**62], [0, 8]),
        ([2], [0, 2**63]),
        ([2], [8, 0]),
        ([2], [0, 4]),
        ([-2], [0, 8]),
    ],
)
def test_a_tensor_that_claims_more_than_is_there_is_refused_and_not_allocated(
    shape: list[int], offsets: list[int]
) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    header = {
        "__metadata__": {"convoy": json.dumps(HEADER)},
        "model/x": {"dtype": "F32", "shape": shape, "data_offsets": offsets},
    }
    with pytest.raises(CheckpointError):
        unpack(_with_header(header, bytes(8)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 << 10


def test_the_frame_of_the_crafted_blocks_is_right() -> None:
    header = {
        "__metadata__": {"convoy": json.dumps(HEADER)},
        "model/x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    assert torch.equal(unpack(_with_header(header, bytes(8))).model["x"], torch.zeros(2))
    assert unpack(_crafted(json.dumps(HEADER))).step == 1


@pytest.mark.parametrize(
    "convoy",
    [
        "",
        "{",
        "null",
        "7",
        "[]",
        "{}",
        '"step"',
        json.dumps({**HEADER, "step": None}),
        json.dumps({**HEADER, "step": "many"}),
        json.dumps({**HEADER, "step": [1]}),
        json.dumps({**HEADER, "step": float("nan")}),
        json.dumps({**HEADER, "step": float("inf")}),
        json.dumps({name: value for name, value in HEADER.items() if name != "progress"}),
        json.dumps({name: value for name, value in HEADER.items() if name != "score"}),
        "9" * 5000,
        "[" * 100_000,
    ],
    ids=lambda text: text[:24],
)
def test_a_whole_block_with_another_header_is_refused(convoy: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        unpack(_crafted(convoy))


@pytest.mark.parametrize("name", ["progress", "identity"])
@pytest.mark.parametrize("value", [[], 7, None, "text"])
def test_progress_and_identity_must_be_records(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        unpack(_crafted(json.dumps({**HEADER, name: value})))


def test_a_safetensors_file_of_someone_else_is_refused() -> None:
    with pytest.raises(CheckpointError):
        unpack(safetensors.torch.save({"model/x": torch.zeros(1)}))
    with pytest.raises(CheckpointError):
        unpack(safetensors.torch.save({"model/x": torch.zeros(1)}, metadata={"format": "pt"}))


def _zipped_pickle() -> bytes:
    """Return what torch itself would write and read."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", PICKLE)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "block",
    [
        PICKLE,
        _zipped_pickle(),
        len(PICKLE).to_bytes(8, "little") + PICKLE,
        _crafted(PICKLE.decode()),
        _with_header({"__metadata__": {"convoy": PICKLE.decode()}}),
    ],
    ids=["bare", "zipped", "as header", "as metadata", "as metadata alone"],
)
def test_pickle_is_refused_and_not_executed(block: bytes) -> None:
    with pytest.raises(CheckpointError):
        unpack(block)
    assert not Path("canary").exists()
