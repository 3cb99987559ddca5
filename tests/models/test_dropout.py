"""A dropout mask belongs to the sample and the layer, not to the batch it is computed in."""

import pytest
import torch
from torch import Tensor, nn

from convoy.models.dropout import SampleDropout, drop_by, key_dropout, torch_dropout
from convoy.randomness import sample_keys


def _keys(count: int, *, epoch: int = 0) -> Tensor:
    return sample_keys(0, epoch, torch.arange(count))


def _dropped(layer: nn.Module, x: Tensor, keys: Tensor) -> Tensor:
    with drop_by(keys):
        result: Tensor = layer(x)
    return result


def test_a_samples_mask_does_not_depend_on_its_batch() -> None:
    layer, keys = SampleDropout(0.5, 0), _keys(20)
    whole = _dropped(layer, torch.ones(20, 30), keys)
    rows = [17, 3, 3, 8]
    assert torch.equal(_dropped(layer, torch.ones(4, 30), keys[rows]), whole[rows])
    assert not torch.equal(whole[0], whole[1])


def test_a_mask_does_not_depend_on_torchs_generator() -> None:
    layer, keys = SampleDropout(0.5, 0), _keys(4)
    first = _dropped(layer, torch.ones(4, 30), keys)
    torch.rand(3)
    assert torch.equal(_dropped(layer, torch.ones(4, 30), keys), first)


def test_another_epoch_gives_other_masks() -> None:
    layer, ones = SampleDropout(0.5, 0), torch.ones(4, 50)
    first, second = (_dropped(layer, ones, _keys(4, epoch=epoch)) for epoch in (0, 1))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_layers_of_one_network_have_independent_masks() -> None:
    ones, keys = torch.ones(100, 100), _keys(100)
    masks = [_dropped(SampleDropout(0.5, layer), ones, keys).reshape(-1) for layer in (0, 1, 2)]
    assert float((torch.corrcoef(torch.stack(masks)) - torch.eye(3)).abs().max()) < 0.05


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_rate_is_p_and_the_rest_is_scaled_up(p: float, dtype: torch.dtype) -> None:
    made = _dropped(SampleDropout(p, 0), torch.ones(200, 100, dtype=dtype), _keys(200))
    assert made.dtype == dtype
    assert float((made == 0).double().mean()) == pytest.approx(p, abs=0.02)
    kept = made[made != 0].unique()
    assert len(kept) == 1
    assert float(kept) == pytest.approx(1 / (1 - p), rel=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_values_that_stay_are_the_inputs_scaled() -> None:
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    made = _dropped(SampleDropout(0.25, 0), x, _keys(5))
    kept = made != 0
    assert 0 < int(kept.sum()) < kept.numel()
    assert torch.allclose(made[kept], x[kept] / 0.75, rtol=1e-14, atol=0)


def test_the_gradient_passes_through_the_same_mask() -> None:
    x = torch.ones(5, 40, requires_grad=True)
    made = _dropped(SampleDropout(0.5, 0), x, _keys(5))
    made.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, made.detach())


@pytest.mark.parametrize("channelwise", [False, True])
def test_evaluation_changes_nothing(channelwise: bool) -> None:
    x = torch.randn(4, 3, 5, 5)
    layer = SampleDropout(0.5, 0, channelwise=channelwise).eval()
    assert torch.equal(_dropped(layer, x, _keys(4)), x)
    assert torch.equal(layer(x), x)


def test_whole_channels_are_dropped_where_asked() -> None:
    made = _dropped(SampleDropout(0.5, 0, channelwise=True), torch.ones(50, 8, 3, 3), _keys(50))
    channels = made.reshape(50, 8, 9)
    assert torch.equal(channels.amin(2), channels.amax(2))
    assert channels.unique().tolist() == [0.0, 2.0]
    assert float((channels == 0).double().mean()) == pytest.approx(0.5, abs=0.1)


def test_single_neurons_are_dropped_elsewhere() -> None:
    made = _dropped(SampleDropout(0.5, 0), torch.ones(50, 8, 3, 3), _keys(50)).reshape(50, 8, 9)
    assert not torch.equal(made.amin(2), made.amax(2))


@pytest.mark.parametrize("with_keys", [True, False])
def test_p_0_keeps_and_p_1_drops_everything(with_keys: bool) -> None:
    x = torch.randn(4, 3, 5, 5)
    keys = _keys(4) if with_keys else None
    with drop_by(keys):
        assert torch.equal(SampleDropout(0.0, 0)(x), x)
        assert torch.equal(SampleDropout(1.0, 0)(x).abs(), torch.zeros_like(x))


@pytest.mark.parametrize("channelwise", [False, True])
def test_without_keys_it_is_torchs_own_dropout(channelwise: bool) -> None:
    x = torch.ones(10, 6, 4, 4)
    layer = SampleDropout(0.5, 0, channelwise=channelwise)
    plain = nn.functional.dropout2d if channelwise else nn.functional.dropout
    torch.manual_seed(1)
    expected = plain(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(layer(x), expected)
    assert (expected == 0).any()


def test_keys_hold_inside_their_context_only() -> None:
    layer, ones = SampleDropout(0.5, 0), torch.ones(4, 100)
    outer, inner = _keys(4), _keys(4, epoch=1)
    with drop_by(outer):
        first = layer(ones)
        with drop_by(inner):
            assert not torch.equal(layer(ones), first)
        assert not torch.equal(layer(ones), first)  # a second use in one pass has its own mask
    with drop_by(outer):
        assert torch.equal(layer(ones), first)
    with pytest.raises(KeyError), drop_by(outer):
        raise KeyError
    torch.manual_seed(0)
    expected = nn.functional.dropout(ones, 0.5)
    torch.manual_seed(0)
    assert torch.equal(layer(ones), expected)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.2), nn.Flatten())
        self.deep = nn.ModuleList([nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 5))])
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep[0](self.body(x))
        result: Tensor = self.drop(x)
        return result


def test_every_nested_dropout_is_replaced_with_a_layer_number_of_its_own() -> None:
    model = _Nested()
    assert key_dropout(model) is model
    layers = [m for m in model.modules() if isinstance(m, SampleDropout)]
    assert not any(isinstance(m, (nn.Dropout, nn.Dropout2d)) for m in model.modules())
    assert {(layer.p, layer.channelwise) for layer in layers} == {
        (0.2, True),
        (0.3, False),
        (0.4, False),
    }
    assert sorted(layer.layer for layer in layers) == [0, 1, 2]


def test_replacing_dropout_keeps_the_names_of_the_weights() -> None:
    model = _Nested()
    former = list(model.state_dict())
    assert list(key_dropout(model).state_dict()) == former


def test_a_whole_network_treats_a_sample_alike_in_any_batch() -> None:
    model, keys = key_dropout(_Nested().double()), _keys(6)
    images = torch.randn(6, 1, 4, 4, dtype=torch.float64)
    whole = _dropped(model, images, keys)
    part = _dropped(model, images[[4, 1]], keys[[4, 1]])
    assert torch.allclose(part, whole[[4, 1]], rtol=1e-12, atol=1e-12)
    assert (whole == 0).any()


def test_the_layer_describes_itself() -> None:
    assert "p=0.5, layer=3, channelwise=True" in repr(SampleDropout(0.5, 3, channelwise=True))


def test_a_dropout_used_twice_is_replaced_twice_with_masks_of_their_own() -> None:
    drop = nn.Dropout(0.5)
    model = key_dropout(nn.Sequential(drop, nn.Flatten(), drop))
    assert isinstance(model, nn.Sequential)
    assert [type(layer) for layer in model] == [SampleDropout, nn.Flatten, SampleDropout]
    assert model[0].layer != model[2].layer


def test_torchs_own_dropout_comes_back() -> None:
    layers = [nn.Linear(2, 2), nn.Dropout(0.3), nn.Sequential(nn.Dropout2d(0.4))]
    model = torch_dropout(key_dropout(nn.Sequential(*layers)))
    assert not any(isinstance(module, SampleDropout) for module in model.modules())
    assert repr(model) == repr(nn.Sequential(*layers))
