"""One piece of data becomes a training and a test part, fairly and repeatably."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.data.images import make_image_set
from convoy.data.split import split, split_indices
from convoy.errors import DataError


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=5),
    st.floats(0.01, 0.9),
    st.integers(0, 1000),
)
@settings(max_examples=60)
def test_the_parts_are_disjoint_complete_and_stratified(
    sizes: list[int], fraction: float, seed: int
) -> None:
    labels = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    train, test = split_indices(labels, fraction, seed)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(len(labels)))
    for number, size in enumerate(sizes):
        count = int((labels[test] == number).sum())
        assert 1 <= count <= size - 1
        assert abs(count - size * fraction) <= 1


def test_every_class_gives_the_asked_fraction() -> None:
    labels = torch.arange(100) % 4
    _, test = split_indices(labels, 0.2, 0)
    assert torch.bincount(labels[test]).tolist() == [5, 5, 5, 5]


def test_the_same_seed_splits_the_same_and_another_differently() -> None:
    labels = torch.arange(200) % 4
    first, again, other = (split_indices(labels, 0.3, seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_test_part_is_no_mere_head_of_the_data() -> None:
    _, test = split_indices(torch.zeros(100, dtype=torch.int64), 0.2, 0)
    assert not torch.equal(test, torch.arange(20))


def test_both_parts_keep_the_order_of_the_data() -> None:
    train, test = split_indices(torch.arange(50) % 3, 0.3, 5)
    assert torch.equal(train, train.sort().values)
    assert torch.equal(test, test.sort().values)


def test_a_class_with_one_sample_is_refused() -> None:
    with pytest.raises(DataError, match="class 2 has one sample only"):
        split_indices(torch.tensor([0, 0, 1, 1, 2]), 0.5, 0)


def test_images_go_with_their_labels() -> None:
    labels = torch.arange(40) % 4
    images = labels.to(torch.uint8)[:, None, None].expand(40, 3, 3)
    train, test = split(make_image_set(images, labels, list("abcd"), "x"), 0.3, 0)
    assert len(train) == 28
    assert len(test) == 12
    for part in (train, test):
        assert torch.equal(part.images_NCHW[:, 0, 0, 0].long(), part.labels)
        assert part.classes == tuple("abcd")
