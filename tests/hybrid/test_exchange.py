"""What nodes tell each other, and that its mirror in the backward pass is right."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from convoy.hybrid.crossings import gather_samples, return_samples, split_answers, split_losses
from convoy.hybrid.exchange import Exchange
from tests.hybrid.mailroom import MailWires, on_all


def test_vector_b5() -> None:
    """Two workers with a sample each; fully connected rows (1, 0) and (2, -1)."""
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weights = torch.tensor([[1.0, 0.0], [2.0, -1.0]])

    def act(rank: int, wires: MailWires) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exchange = Exchange(wires, rank, 2)
        h = features[rank : rank + 1].clone().requires_grad_()
        row = weights[rank : rank + 1].clone().requires_grad_()
        gathered = gather_samples(h, exchange, (1, 1))
        out = functional.linear(gathered, row)
        out.backward(torch.ones_like(out))
        assert h.grad is not None
        assert row.grad is not None
        return gathered.detach(), out.detach().flatten(), row.grad, h.grad

    (zero, one), room = on_all(2, act)
    for gathered, _, row_grad, own_grad in (zero, one):
        assert torch.equal(gathered, features)
        assert row_grad.tolist() == [[4.0, 6.0]]
        assert own_grad.tolist() == [[3.0, -1.0]]
    assert zero[1].tolist() == [1.0, 3.0]
    assert one[1].tolist() == [0.0, 2.0]
    assert room.messages == 4
    assert room.numbers == 2 * (2 + 2)  # a sample's features, and their gradient: (P-1) b F each


@pytest.mark.parametrize("counts", [(2, 3), (0, 4, 1), (1, 1, 1, 1)], ids=str)
def test_bytes_are_those_of_the_cost_model(counts: tuple[int, ...]) -> None:
    size, width = len(counts), 5

    def act(rank: int, wires: MailWires) -> int:
        exchange = Exchange(wires, rank, size)
        own = torch.ones(counts[rank], width, dtype=torch.float64, requires_grad=True)
        everyone = gather_samples(own, exchange, counts)
        back = return_samples(everyone * (rank + 1), exchange, counts)
        assert torch.equal(back, torch.full_like(own, sum(range(size + 1))))
        back.sum().backward()
        assert own.grad is not None
        assert own.grad.tolist() == [[sum(range(size + 1))] * width] * counts[rank]
        return exchange.sent_bytes

    sent, room = on_all(size, act)
    assert room.numbers == 4 * (size - 1) * sum(counts) * width
    assert sum(sent) == room.numbers * 8


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_split_loss_is_torchs_own(smoothing: float) -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, 11, dtype=torch.float64) * 30  # far apart: naive sums would overflow
    labels = torch.randint(0, 11, (9,))
    widths = (5, 2, 4)
    whole = logits.clone().requires_grad_()
    expected = functional.cross_entropy(whole, labels, reduction="none", label_smoothing=smoothing)
    scale = torch.rand(9, dtype=torch.float64)
    expected.backward(scale)

    def act(rank: int, wires: MailWires) -> tuple[Tensor, Tensor, Tensor]:
        exchange = Exchange(wires, rank, 3)
        first = sum(widths[:rank])
        own = logits[:, first : first + widths[rank]].clone().requires_grad_()
        losses = split_losses(own, labels, exchange, first=first, classes=11, smoothing=smoothing)
        losses.backward(scale)
        assert own.grad is not None
        return losses.detach(), own.grad, split_answers(own.detach(), exchange, first)

    found, _ = on_all(3, act)
    assert whole.grad is not None
    for losses, _, answers in found:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(answers, logits.argmax(1))
    torch.testing.assert_close(torch.cat([g for _, g, _ in found], 1), whole.grad)
