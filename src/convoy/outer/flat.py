"""A network's numbers as one vector: first the weights, which rules change, then the statistics.

Batch-norm's running mean and variance are no weights. An increment from an old base could make
a variance negative; so they travel as they are, behind the weights, and are averaged.
Counters (whole numbers) stay where they are.
"""

import torch
from torch import Tensor, nn

from convoy.files import digest_of_text


class Flat:
    """Reads and writes a network as one vector.

    Args:
        statistics: they are part of the vector; otherwise every node keeps its own.

    Attributes:
        weights: how many numbers of the vector are weights; the rest are statistics.
        size: of the vector.
        digest: of the names and shapes, in order: vectors of equal digests fit each other.
    """

    def __init__(self, model: nn.Module, *, statistics: bool = True) -> None:
        weights: dict[str, Tensor] = dict(model.named_parameters())
        buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        travelling = weights | (buffers if statistics else {})
        self._tensors = [tensor.detach() for tensor in travelling.values()]
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self.weights = sum(tensor.numel() for tensor in weights.values())
        self.size = sum(self._sizes)
        self.dtype = self._tensors[0].dtype
        lines = [f"{n} {tuple(t.shape)} {t.dtype}" for n, t in travelling.items()]
        self.digest = digest_of_text("\n".join(lines))

    def read(self) -> Tensor:
        """Return the network as a vector of this machine's memory."""
        return torch.cat([t.reshape(-1).to("cpu", self.dtype) for t in self._tensors])

    def write(self, vector: Tensor) -> None:
        """Set the network to a vector."""
        with torch.no_grad():
            for tensor, part in zip(self._tensors, vector.split(self._sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))
