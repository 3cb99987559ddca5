"""Unequal nodes in virtual time: one device does all arithmetic, a clock counts what nodes would do.

What a rule learns in a given time does not depend on how fast the machine is that tries it out.
Nodes train from the weights they pulled, with momentum of their own; whoever would be done next is
computed next, and the package's own `Merger` decides what becomes of it.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.outer.merger import Merger, Reply
from convoy.outer.rules.rule import Rule, Submission


@dataclass(frozen=True, slots=True)
class Images:
    """Labelled images on the device, as bytes."""

    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """What a simulated run is made of.

    Attributes:
        speeds: of the nodes, in any unit.
        batch: samples of each node's local step.
        every: local steps between two exchanges, for each node.
        epochs: so much could all nodes together train in the time that is given.
        lr: at the start; it falls to zero along a cosine over the time.
    """

    speeds: tuple[float, ...]
    batch: tuple[int, ...]
    every: tuple[int, ...]
    epochs: float
    lr: float = 0.1
    seed: int = 0
    first_version: int = 1
    bound: int | None = None


class Workbench:
    """A network whose weights lie in one vector, and the step that trains them.

    On a GPU the step is captured once for each batch size: launching it costs nothing then.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Images,
        test: Images,
        *,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        padding: int = 4,
    ) -> None:
        self._model = model
        self.train_set, self._test = train, test
        self._mu, self._decay, self._padding = momentum, weight_decay, padding
        device = train.pixels.device
        parameters = [p for p in model.parameters() if p.requires_grad]
        size = sum(p.numel() for p in parameters)
        self._weights, self._gradient, self._momentum = (
            torch.zeros(size, device=device) for _ in range(3)
        )
        for p, w, g in zip(
            parameters,
            self._weights.split([p.numel() for p in parameters]),
            self._gradient.split([p.numel() for p in parameters]),
            strict=True,
        ):
            view = w.as_strided(p.shape, p.stride(), w.storage_offset())
            view.copy_(p.data)
            p.data = view
            p.grad = g.as_strided(p.shape, p.stride(), g.storage_offset())
        self._rate = torch.zeros((), device=device)
        self._correct = torch.zeros((), device=device)
        sample = train.pixels[:5000].float() / 255
        self._mean = sample.mean((0, 2, 3))[:, None, None]
        self._std = sample.std((0, 2, 3))[:, None, None]
        self._steps: dict[int, tuple[Tensor, object]] = {}

    @property
    def start(self) -> Tensor:
        """Return a copy of the weights as they are."""
        return self._weights.clone()

    def local_steps(
        self, weights: Tensor, momentum: Tensor, picks: Sequence[Tensor], rate: float
    ) -> tuple[Tensor, float]:
        """Train from some weights; return the increment and the accuracy on the way.

        The momentum is changed in place.
        """
        self._weights.copy_(weights)
        self._momentum.copy_(momentum)
        self._rate.fill_(rate)
        self._correct.zero_()
        for pick in picks:
            self._step(pick)
        momentum.copy_(self._momentum)
        seen = sum(len(pick) for pick in picks)
        return self._weights - weights, float(self._correct) / seen

    def accuracy(self, weights: Tensor) -> float:
        """Return the accuracy on the test images, with batch-norm's statistics measured anew."""
        self._weights.copy_(weights)
        norms = [m for m in self._model.modules() if isinstance(m, nn.BatchNorm2d)]
        kept = [norm.momentum for norm in norms]
        with torch.no_grad():
            self._model.train()
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over what follows
            for part in torch.arange(0, 10_000, device=self._weights.device).split(500):
                self._model(
                    self._normalise(self.train_set.pixels[part % len(self.train_set.labels)])
                )
            for norm, momentum in zip(norms, kept, strict=True):
                norm.momentum = momentum
            self._model.eval()
            right = sum(
                (self._model(self._normalise(pixels)).argmax(1) == labels).sum()
                for pixels, labels in zip(
                    self._test.pixels.split(2000), self._test.labels.split(2000), strict=True
                )
            )
            self._model.train()
        return float(right) / len(self._test.labels)

    def _step(self, pick: Tensor) -> None:
        if pick.device.type != "cuda":
            self._compute(pick)
            return
        if len(pick) not in self._steps:
            self._steps[len(pick)] = self._capture(pick)
        held, graph = self._steps[len(pick)]
        held.copy_(pick)
        graph.replay()  # type: ignore[attr-defined]

    def _capture(self, pick: Tensor) -> tuple[Tensor, object]:
        held = pick.clone()
        saved = [t.clone() for t in (self._weights, self._momentum, self._correct)]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._compute(held)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute(held)
        for tensor, value in zip(
            (self._weights, self._momentum, self._correct), saved, strict=True
        ):
            tensor.copy_(value)
        return held, graph

    def _compute(self, pick: Tensor) -> None:
        images = self._varied(self.train_set.pixels[pick])
        labels = self.train_set.labels[pick]
        self._gradient.zero_()
        logits = self._model(images)
        functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._correct += (logits.argmax(1) == labels).sum()
            self._gradient.add_(self._weights, alpha=self._decay)
            self._momentum.mul_(self._mu).add_(self._gradient)
            self._weights.sub_(self._momentum * self._rate)

    def _normalise(self, pixels: Tensor) -> Tensor:
        scaled = (pixels.float() / 255 - self._mean) / self._std
        return scaled.contiguous(memory_format=torch.channels_last)

    def _varied(self, pixels: Tensor) -> Tensor:
        count, channels, height, width = pixels.shape
        p, device = self._padding, pixels.device
        padded = functional.pad(pixels, (p, p, p, p))
        top, left = (torch.randint(0, 2 * p + 1, (count, 1), device=device) for _ in range(2))
        across = torch.arange(width, device=device).expand(count, width)
        mirrored = torch.rand(count, 1, device=device) < 0.5
        columns = torch.where(mirrored, width - 1 - across, across) + left
        rows = torch.arange(height, device=device) + top
        which = torch.arange(count, device=device)[:, None, None, None]
        channel = torch.arange(channels, device=device)[None, :, None, None]
        return self._normalise(
            padded[which, channel, rows[:, None, :, None], columns[:, None, None, :]]
        )


class _Supply:
    """A node's own samples, in a new order each time through."""

    def __init__(self, samples: Tensor, generator: torch.Generator) -> None:
        self._samples, self._generator = samples, generator
        self._order, self._next = samples, len(samples)

    def take(self, count: int) -> Tensor:
        if self._next + count > len(self._samples):
            device = self._samples.device
            order = torch.randperm(len(self._samples), generator=self._generator).to(device)
            self._order, self._next = self._samples[order], 0
        self._next += count
        return self._order[self._next - count : self._next]


def simulate(bench: Workbench, rule: Rule, trial: Trial) -> tuple[float, int]:
    """Let nodes train until the time is over; return accuracy and versions made."""
    torch.manual_seed(trial.seed)
    supplies = _supplies(bench, trial)
    total = trial.epochs * len(bench.train_set.labels) / sum(trial.speeds)
    merger: Merger[Tensor] = Merger(
        rule, bench.start, first_version=trial.first_version, bound=trial.bound
    )
    momenta = [torch.zeros_like(merger.weights) for _ in trial.speeds]
    at: dict[int, Reply[Tensor]] = {}
    due: list[tuple[float, int]] = []

    def send_off(reply: Reply[Tensor], now: float) -> None:
        node = reply.node
        at[node] = reply
        busy = trial.every[node] * trial.batch[node] / trial.speeds[node]
        heapq.heappush(due, (now + busy, node))

    for node in range(len(trial.speeds)):
        send_off(merger.join(node), 0.0)
    while due and due[0][0] <= total:
        now, node = heapq.heappop(due)
        base = at[node]
        rate = trial.lr * 0.5 * (1 + math.cos(math.pi * now / total))
        picks = [supplies[node].take(trial.batch[node]) for _ in range(trial.every[node])]
        increment, quality = bench.local_steps(base.weights, momenta[node], picks, rate)
        samples = trial.every[node] * trial.batch[node]
        submission = Submission(
            node,
            base.version,
            increment,
            samples=samples,
            quality=quality,
            rate=max(rate * trial.every[node], 1e-9),
        )
        for reply in merger.submit(submission):
            send_off(reply, now)
    return bench.accuracy(merger.weights), merger.version


def _supplies(bench: Workbench, trial: Trial) -> list[_Supply]:
    """Deal the samples out to the nodes in proportion to their speeds."""
    generator = torch.Generator().manual_seed(trial.seed)
    count = len(bench.train_set.labels)
    order = torch.randperm(count, generator=generator).to(bench.train_set.labels.device)
    sizes = [int(count * speed / sum(trial.speeds)) for speed in trial.speeds]
    sizes[0] += count - sum(sizes)
    return [_Supply(part, generator) for part in order.split(sizes)]
