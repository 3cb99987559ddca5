"""Batches hold every sample once, normalised, and leave the stored images alone."""

import pytest
import torch
from torch import Tensor

from convoy.data.augment import Augmentation
from convoy.data.batches import Batch, Batches, join_batches
from convoy.data.images import ImageSet, channel_statistics, make_image_set
from convoy.randomness import epoch_order, sample_keys

_COUNT = 23
_FULL = Augmentation(padding=2, flip=True, cutout=3)


def _image_set(dtype: torch.dtype = torch.uint8, channels: int = 3) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (_COUNT, channels, 8, 8), generator=generator)
    images[:, 0] //= 3
    return make_image_set(images.to(dtype), list(range(_COUNT)), None, "numbered")


def _batches(
    images: ImageSet,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Batches:
    mean, std = channel_statistics(images.images_NCHW)
    return Batches(
        images,
        mean=mean,
        std=std,
        device=torch.device("cpu"),
        dtype=dtype,
        memory_format=memory_format,
    )


def _in_order(batches: Batches, size: int) -> Tensor:
    return torch.cat([batch.images_NCHW for batch in batches.in_order(size)])


@pytest.mark.parametrize("stored", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalised_to_mean_0_and_deviation_1(
    stored: torch.dtype, channels: int
) -> None:
    images = _in_order(_batches(_image_set(stored, channels)), 7).double()
    by_channel = images.transpose(0, 1).reshape(channels, -1)
    assert by_channel.mean(1).tolist() == pytest.approx([0.0] * channels, abs=1e-5)
    assert by_channel.std(1, correction=0).tolist() == pytest.approx([1.0] * channels, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_have_the_asked_type_and_layout(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    batches = _batches(_image_set(), dtype, memory_format)
    made = [next(batches.in_order(4)), batches.epoch(0, seed=0, augmentation=_FULL).batch(0, 4)]
    for batch in made:
        assert batch.images_NCHW.dtype == dtype
        assert batch.images_NCHW.is_contiguous(memory_format=memory_format)


def test_the_layout_does_not_change_the_values() -> None:
    plain, last = _batches(_image_set()), _batches(_image_set(), memory_format=torch.channels_last)
    assert torch.equal(_in_order(plain, 5), _in_order(last, 5))


@pytest.mark.parametrize("size", [1, 5, 8, _COUNT, 100])
def test_an_epoch_visits_every_sample_exactly_once(size: int) -> None:
    epoch = _batches(_image_set()).epoch(2, seed=1, augmentation=_FULL)
    seen: list[int] = []
    for start in range(0, _COUNT, size):
        batch = epoch.batch(start, start + size)
        assert len(batch) == len(batch.images_NCHW) == min(size, _COUNT - start)
        seen += batch.labels.tolist()
    assert sorted(seen) == list(range(_COUNT))


def test_an_epoch_goes_by_its_seeded_order_and_carries_the_samples_keys() -> None:
    batch = _batches(_image_set()).epoch(2, seed=1, augmentation=_FULL).batch(3, 9)
    order = epoch_order(1, 2, _COUNT)[3:9]
    assert torch.equal(batch.labels, order)
    assert batch.keys is not None
    assert torch.equal(batch.keys, sample_keys(1, 2, order))


def test_parts_of_an_epoch_can_be_asked_for_in_any_order() -> None:
    epoch = _batches(_image_set()).epoch(0, seed=0, augmentation=_FULL)
    late = epoch.batch(10, 15).images_NCHW
    epoch.batch(0, 5)
    assert torch.equal(late, epoch.batch(10, 15).images_NCHW)
    assert torch.equal(late, epoch.batch(0, _COUNT).images_NCHW[10:15])


def test_epochs_differ_in_their_order() -> None:
    batches = _batches(_image_set())
    first, second = (
        batches.epoch(number, seed=0, augmentation=Augmentation()).batch(0, _COUNT).labels
        for number in (0, 1)
    )
    assert not torch.equal(first, second)


def test_without_augmentation_an_epoch_has_the_plain_images() -> None:
    batches = _batches(_image_set())
    batch = batches.epoch(0, seed=0, augmentation=Augmentation()).batch(0, _COUNT)
    assert torch.equal(batch.images_NCHW, _in_order(batches, _COUNT)[batch.labels])


@pytest.mark.parametrize("size", [1, 5, _COUNT, 100])
def test_evaluation_sees_all_samples_in_order_without_keys(size: int) -> None:
    images = _image_set()
    made = list(_batches(images).in_order(size))
    assert torch.equal(torch.cat([batch.labels for batch in made]), images.labels)
    assert [len(batch) for batch in made[:-1]] == [size] * (len(made) - 1)
    assert sum(len(batch) for batch in made) == _COUNT
    assert all(batch.keys is None for batch in made)


def test_images_and_labels_are_looked_up_by_number() -> None:
    images = _image_set()
    batches = _batches(images)
    numbers = torch.tensor([4, 0, 4])
    assert len(batches) == _COUNT
    assert torch.equal(batches.pixels(numbers), images.images_NCHW[numbers])
    assert batches.labels(numbers).tolist() == [4, 0, 4]


@pytest.mark.parametrize("stored", [torch.uint8, torch.float32])
@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(cutout=4), _FULL])
def test_the_stored_images_never_change(stored: torch.dtype, augmentation: Augmentation) -> None:
    images = _image_set(stored, 1)
    former = images.images_NCHW.clone()
    batches = Batches(images, mean=(0.0,), std=(1.0,), device=torch.device("cpu"))
    epoch = batches.epoch(0, seed=0, augmentation=augmentation)
    for batch in (epoch.batch(0, _COUNT), next(batches.in_order(_COUNT))):
        batch.images_NCHW.fill_(7.0)
    assert torch.equal(images.images_NCHW, former)


def test_cutting_out_blanks_to_the_mean_colour() -> None:
    batches = _batches(_image_set())
    batch = batches.epoch(0, seed=0, augmentation=Augmentation(cutout=4)).batch(0, _COUNT)
    plain = _in_order(batches, _COUNT)[batch.labels]
    changed = batch.images_NCHW != plain
    assert changed.any()
    assert (batch.images_NCHW[changed] == 0).all()


@pytest.mark.parametrize("chunk_bytes", [1, 4000, 8 << 20])
@pytest.mark.parametrize("first", [0, 2])
def test_batches_prepared_several_at_once_equal_those_asked_for_one_by_one(
    chunk_bytes: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.data.batches._CHUNK_BYTES", chunk_bytes)
    samples = _batches(_image_set(), memory_format=torch.channels_last)
    epoch = samples.epoch(1, seed=3, augmentation=Augmentation(padding=1, flip=True, cutout=2))
    given = list(epoch.batches(7, first))
    starts = range(7 * first, _COUNT, 7)
    assert len(given) == len(starts)
    for batch, start in zip(given, starts, strict=True):
        wanted = epoch.batch(start, start + 7)
        assert torch.equal(batch.images_NCHW, wanted.images_NCHW)
        assert torch.equal(batch.labels, wanted.labels)
        assert batch.keys is not None
        assert wanted.keys is not None
        assert torch.equal(batch.keys, wanted.keys)


def test_a_given_order_decides_who_comes_when_and_each_keeps_its_own_variation() -> None:
    batches = _batches(_image_set())
    order = torch.tensor([7, 2, 7, 19])
    given = batches.epoch(2, seed=1, augmentation=_FULL, order=order).batch(0, 4)
    assert given.labels.tolist() == [7, 2, 7, 19]
    usual = batches.epoch(2, seed=1, augmentation=_FULL).batch(0, _COUNT)
    places = [usual.labels.tolist().index(number) for number in order]
    assert torch.equal(given.images_NCHW, usual.images_NCHW[places])
    assert given.keys is not None
    assert torch.equal(given.keys, sample_keys(1, 2, order))


def test_a_given_order_may_be_short_and_is_cut_into_batches() -> None:
    epoch = _batches(_image_set()).epoch(
        0, seed=0, augmentation=Augmentation(), order=torch.tensor([3, 1, 4, 15, 9])
    )
    assert epoch.order.tolist() == [3, 1, 4, 15, 9]
    assert [b.labels.tolist() for b in epoch.batches(2)] == [[3, 1], [4, 15], [9]]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_joined_batches_are_the_batch_of_all_their_samples(
    memory_format: torch.memory_format,
) -> None:
    epoch = _batches(_image_set(), memory_format=memory_format).epoch(1, seed=0, augmentation=_FULL)
    whole = epoch.batch(0, 12)
    joined = join_batches([epoch.batch(0, 3), epoch.batch(3, 4), epoch.batch(4, 12)])
    assert torch.equal(joined.images_NCHW, whole.images_NCHW)
    assert joined.images_NCHW.is_contiguous(memory_format=memory_format)
    assert torch.equal(joined.labels, whole.labels)
    assert joined.keys is not None
    assert whole.keys is not None
    assert torch.equal(joined.keys, whole.keys)
    assert join_batches([whole]) is whole


def test_batches_without_keys_are_joined_too() -> None:
    parts = list(_batches(_image_set()).in_order(10))
    joined = join_batches(parts)
    assert isinstance(joined, Batch)
    assert len(joined) == _COUNT
    assert joined.keys is None


def test_images_and_labels_that_arrive_during_a_pass_are_part_of_it() -> None:
    whole = _image_set()
    here = ImageSet(
        torch.zeros_like(whole.images_NCHW), torch.zeros_like(whole.labels), whole.classes
    )
    mean, std = channel_statistics(whole.images_NCHW)
    device = torch.device("cpu")
    arriving, complete = (
        Batches(images, mean=mean, std=std, device=device) for images in (here, whole)
    )
    epochs = [b.epoch(0, seed=0, augmentation=_FULL) for b in (arriving, complete)]
    wanted = epochs[0].order[5:9]
    here.images_NCHW[wanted], here.labels[wanted] = whole.images_NCHW[wanted], wanted
    arriving.refresh(here, wanted)
    found, expected = (epoch.batch(5, 9) for epoch in epochs)
    assert torch.equal(found.images_NCHW, expected.images_NCHW)
    assert torch.equal(found.labels, expected.labels)
