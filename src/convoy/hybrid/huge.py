"""A classifier too large for one process: each makes and keeps the weights of some classes.

`--strategy hybrid` cuts a network that was built whole. Here the last layer is nowhere whole, not
even at the start.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed, nn

from convoy.collectives.wires import ProcessGroupWires
from convoy.config import Config
from convoy.hybrid.computation import Computation, Marks
from convoy.hybrid.exchange import Exchange
from convoy.hybrid.head import Layer, find_parts, lay_out
from convoy.hybrid.split import Cut, Split
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.optimizer import make_optimizer
from convoy.outer.allocation.shares import apportion

MakeRows = Callable[[int, int], Tensor]


class MadeInParts(Split):
    """A split of a layer that has no memory of its own: each rank makes its part.

    Args:
        layers: cut by columns; their modules lie on the device "meta".
        shared: the modules that every rank has.
        rank: of this process.
        make_rows: returns the weights of some neurons: the first, and where they stop.
        config: of the optimizer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        shared: nn.Module,
        rank: int,
        make_rows: MakeRows,
        config: Config,
    ) -> None:
        self._make_rows = make_rows
        super().__init__(layers, make_optimizer(shared, config), rank)

    def _take(self, whole: nn.Parameter, axis: int, bounds: tuple[int, ...]) -> None:
        assert whole.is_meta, "the whole of it is in memory"
        assert axis == 0, "only output neurons can be made one by one"
        first, stop = bounds[self._rank], bounds[self._rank + 1]
        is_bias = whole.dim() == 1
        made = torch.zeros(stop - first) if is_bias else self._make_rows(first, stop)
        part = nn.Parameter(made)
        self.cuts.append(Cut(whole, part, whole.shape, axis, bounds))
        self._momentum[part] = torch.zeros_like(made)  # an optimizer wants it of all or none


class HugeHead:
    """A network that ends in a layer of which this process, a rank of a group, has some classes.

    Made within a process group of torch.distributed (gloo), by all of its ranks.

    Args:
        trunk: what comes before it; all ranks have all of it.
        features: that the trunk gives of a sample.
        classes: of all ranks.
        make_rows: returns the initial weights of some classes: the first, and where they stop.
        config: of the optimizer; its rate stays as it is.
        deadline_s: how long a rank is waited for.
    """

    def __init__(
        self,
        trunk: nn.Module,
        features: int,
        classes: int,
        make_rows: MakeRows,
        config: Config,
        deadline_s: float = 300.0,
    ) -> None:
        rank, self._size = distributed.get_rank(), distributed.get_world_size()
        last = nn.Linear(features, classes, device="meta")
        parts = find_parts(nn.Sequential(trunk, last))
        widths = apportion([1.0] * self._size, classes)
        shared, layers = lay_out(parts, ("columns",), [widths], self._size)
        split = MadeInParts(layers, trunk, rank, make_rows, config)
        self._exchange = Exchange(ProcessGroupWires(deadline_s=deadline_s), rank, self._size)
        arithmetic = Arithmetic(torch.device("cpu"))
        self._computation = Computation(shared, layers, split, self._exchange, arithmetic)
        self._shared = list(self._computation.shared.parameters())
        self._optimizers = split.make_optimizers(self._computation.shared, config)

    def step(self, images_NCHW: Tensor, labels: Tensor) -> float:  # noqa: N803 - shapes are in names
        """Train on everyone's samples, as many of each rank; return the sum of own losses."""
        counts = (len(labels),) * self._size
        marks = Marks(counts, self._exchange.gather(labels, counts), None)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        sums = self._computation.gradients(images_NCHW, marks, sum(counts), lambda: None)
        self._add_up_shared()
        for optimizer in self._optimizers:
            optimizer.step()
        return float(sums.loss)

    def _add_up_shared(self) -> None:
        """Add up the gradients of what every rank has."""
        gradients = [weight.grad for weight in self._shared if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))
