"""A network as one vector: weights first, statistics behind, counters not at all."""

import copy

import pytest
import torch
from torch import Tensor, nn

from convoy.outer.flat import Flat


def network(width: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(4 * width, 2)
    )
    model(torch.randn(8, 1, 4, 4))
    return model


def test_a_vector_brings_another_network_to_the_same_numbers() -> None:
    one, other = network(), network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    mean = other[1].running_mean
    assert isinstance(mean, Tensor)
    mean += 1.0
    Flat(other).write(Flat(one).read())
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_weights_come_first_then_statistics_and_counters_stay() -> None:
    model = network()
    flat = Flat(model)
    weights = sum(p.numel() for p in model.parameters())
    assert (flat.weights, flat.size) == (weights, weights + 8)
    vector = flat.read()
    assert (
        vector[: flat.weights].tolist()
        == nn.utils.parameters_to_vector(model.parameters()).tolist()
    )
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert torch.equal(vector[flat.weights :], torch.cat([norm.running_mean, norm.running_var]))
    flat.write(vector * 0)
    assert norm.num_batches_tracked == 1
    assert norm.running_var.tolist() == [0.0] * 4


def test_where_nodes_keep_their_statistics_only_weights_travel() -> None:
    model = network()
    flat = Flat(model, statistics=False)
    assert flat.size == flat.weights
    before = copy.deepcopy(model[1].state_dict())
    flat.write(torch.zeros(flat.size))
    assert torch.equal(model[1].state_dict()["running_var"], before["running_var"])
    assert all(p.abs().max() == 0 for p in model.parameters())


def test_the_layout_in_memory_does_not_matter() -> None:
    plain, last = network(), network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert torch.equal(Flat(plain).read(), Flat(last).read())
    Flat(last).write(2 * Flat(plain).read())
    assert torch.equal(Flat(last).read(), 2 * Flat(plain).read())
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_what_is_read_does_not_change_with_the_network() -> None:
    model = network()
    vector = Flat(model).read()
    before = vector.clone()
    nn.init.zeros_(model[3].weight)  # type: ignore[arg-type]
    assert torch.equal(vector, before)


def test_a_vector_of_another_size_is_refused() -> None:
    flat = Flat(network())
    with pytest.raises((RuntimeError, ValueError)):
        flat.write(torch.zeros(flat.size + 1))


def test_digests_tell_networks_that_do_not_fit_apart() -> None:
    digest = Flat(network()).digest
    assert digest == Flat(copy.deepcopy(network())).digest
    others = [
        Flat(network(), statistics=False),
        Flat(network(5)),
        Flat(network().double()),
        Flat(nn.Sequential(*list(network())[:2])),
    ]
    assert len({digest, *(other.digest for other in others)}) == 5


def test_tied_weights_travel_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    flat = Flat(model)
    assert flat.size == 9 + 3 + 3
    flat.write(torch.arange(15.0))
    one, other = (dict(layer.named_parameters())["weight"] for layer in model)
    assert torch.equal(one, other)
    assert torch.equal(flat.read(), torch.arange(15.0))
