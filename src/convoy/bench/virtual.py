"""Unequal nodes in virtual time: one device computes, a clock counts what nodes would have done.

What a rule learns in a given time does not depend on how fast the machine is that tries it out.
Nodes train from the weights they pulled, with momentum of their own; whoever would be done next is
computed next, and the package's own `Merger` decides what becomes of it.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.outer.allocation.shares import apportion
from convoy.outer.merger import Merger, Reply
from convoy.outer.rules.rule import Rule, Submission

_TYPICAL = 10_000  # samples that batch-norm's statistics are measured on


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
        ahead: steps that a node does before it hears the answer to what it handed in.
        jitter: the deviation of a node's pace, as a part of it, drawn anew for each exchange.
        stumbles: how often a node takes four times as long, as a part of its exchanges.
        held: samples that each node is dealt; nothing: in proportion to the speeds.
    """

    speeds: tuple[float, ...]
    batch: tuple[int, ...]
    every: tuple[int, ...]
    epochs: float
    lr: float = 0.1
    seed: int = 0
    bound: int | None = None
    ahead: int = 0
    jitter: float = 0.0
    stumbles: float = 0.0
    held: tuple[int, ...] = ()


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
        nesterov: bool = True,
    ) -> None:
        self._model = model
        self.train_set, self._test = train, test
        self._mu, self._decay, self._padding = momentum, weight_decay, padding
        self._nesterov = nesterov
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
        # The files are sorted by class: a stretch of them would be no sample.
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(train.labels), generator=generator)
        self._typical = order[:_TYPICAL].to(device)
        sample = train.pixels[self._typical].float() / 255
        self._mean = sample.mean((0, 2, 3))[:, None, None]
        self._std = sample.std((0, 2, 3))[:, None, None]
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graphs: dict[tuple[int, ...], tuple[Tensor, torch.cuda.CUDAGraph]] = {}

    @property
    def start(self) -> Tensor:
        """Return a copy of the weights as they are."""
        return self._weights.clone()

    def local_steps(
        self, weights: Tensor, momentum: Tensor, picks_sb: Tensor, rate: float
    ) -> tuple[Tensor, Tensor]:
        """Train from some weights, step by step; return the new ones and how many were right.

        The momentum is changed in place.
        """
        self._weights.copy_(weights)
        self._momentum.copy_(momentum)
        self._rate.fill_(rate)
        self._correct.zero_()
        if picks_sb.device.type == "cuda":
            self._replay(picks_sb)
        else:
            self._compute(picks_sb)
        momentum.copy_(self._momentum)
        return self._weights.clone(), self._correct.clone()

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
            for part in self._typical.split(500):
                self._model(self._normalise(self.train_set.pixels[part]))
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

    def _replay(self, picks_sb: Tensor) -> None:
        shape = tuple(picks_sb.shape)
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(picks_sb)
        held, graph = self._graphs[shape]
        held.copy_(picks_sb)
        graph.replay()

    def _capture(self, picks_sb: Tensor) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        held = picks_sb.clone()
        state = (self._weights, self._momentum, self._correct)
        saved = [tensor.clone() for tensor in state]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._compute(held[:1])
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._compute(held)
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        return held, graph

    def _compute(self, picks_sb: Tensor) -> None:
        for pick in picks_sb:
            images = self._varied(self.train_set.pixels[pick])
            labels = self.train_set.labels[pick]
            self._gradient.zero_()
            logits = self._model(images)
            functional.cross_entropy(logits, labels).backward()
            with torch.no_grad():
                self._correct += (logits.argmax(1) == labels).sum()
                self._gradient.add_(self._weights, alpha=self._decay)
                self._momentum.mul_(self._mu).add_(self._gradient)
                if self._nesterov:
                    self._gradient.add_(self._momentum, alpha=self._mu)
                step = self._gradient if self._nesterov else self._momentum
                self._weights.sub_(step * self._rate)

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

    def take(self, steps: int, batch: int) -> Tensor:
        """Return the sample numbers of some steps."""
        picks = [self._batch(batch) for _ in range(steps)]
        return torch.stack(picks)

    def _batch(self, count: int) -> Tensor:
        if self._next + count > len(self._samples):
            device = self._samples.device
            order = torch.randperm(len(self._samples), generator=self._generator).to(device)
            self._order, self._next = self._samples[order], 0
        self._next += count
        return self._order[self._next - count : self._next]


@dataclass(eq=False)
class _Node:
    """A simulated node: what it trains from, and what it carries along."""

    supply: _Supply
    momentum: Tensor
    local: Tensor
    base: Reply[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial gave.

    Attributes:
        accuracy: on the test images, when the time was over.
        versions: of the global weights that were made.
        samples: that were trained for them.
        waiting: the part of the nodes' time that they waited for others.
    """

    accuracy: float
    versions: int
    samples: int
    waiting: float


def simulate(bench: Workbench, rule: Rule, trial: Trial) -> Outcome:
    """Let nodes train until the time is over."""
    return _Simulation(bench, rule, trial).run()


class _Simulation:
    """One trial under way; `due` holds when each node will hand in."""

    def __init__(self, bench: Workbench, rule: Rule, trial: Trial) -> None:
        torch.manual_seed(trial.seed)
        self._bench, self._trial = bench, trial
        self._chance = random.Random(trial.seed)  # noqa: S311 - not for secrets
        self._total = trial.epochs * len(bench.train_set.labels) / sum(trial.speeds)
        self._merger: Merger[Tensor] = Merger(rule, bench.start, bound=trial.bound)
        self._nodes = [
            _Node(supply, torch.zeros_like(bench.start), bench.start)
            for supply in _supplies(bench, trial)
        ]
        self._due: list[tuple[float, int]] = []
        self._busy = 0.0
        self._samples = 0

    def run(self) -> Outcome:
        """Train until the time is over."""
        for number in range(len(self._nodes)):
            self._send_off([self._merger.join(number)], 0.0)
        while True:
            deadline = self._merger.deadline
            at_most = self._due[0][0] if self._due else math.inf
            now = min(at_most, deadline if deadline is not None else math.inf)
            if now > self._total:
                break
            if deadline is not None and deadline <= at_most:
                self._send_off(self._merger.tick(deadline), deadline)
            else:
                _, number = heapq.heappop(self._due)
                self._send_off(self._merger.submit(self._train(number, now), now), now)
        self._merger.flush(self._total)
        spent = self._busy / (self._total * len(self._nodes))
        accuracy = self._bench.accuracy(self._merger.weights)
        return Outcome(accuracy, self._merger.version, self._samples, max(0.0, 1 - spent))

    def _send_off(self, replies: Sequence[Reply[Tensor]], now: float) -> None:
        trial = self._trial
        for reply in replies:
            number = reply.node
            self._nodes[number].base = reply
            takes = trial.every[number] * trial.batch[number] / trial.speeds[number]
            if trial.jitter:
                takes *= math.exp(self._chance.gauss(0, trial.jitter))
            if self._chance.random() < trial.stumbles:
                takes *= 4
            self._busy += min(takes, self._total - now)
            heapq.heappush(self._due, (now + takes, number))

    def _train(self, number: int, now: float) -> Submission[Tensor]:
        """Do what a node has done until now."""
        node, trial = self._nodes[number], self._trial
        assert node.base is not None
        rate = trial.lr * 0.5 * (1 + math.cos(math.pi * now / self._total))
        steps, batch = trial.every[number], trial.batch[number]
        start, right = node.base.weights, torch.zeros((), device=node.momentum.device)
        if trial.ahead:  # these were done from its own weights, before the answer was there
            picks = node.supply.take(trial.ahead, batch)
            moved, right = self._bench.local_steps(node.local, node.momentum, picks, rate)
            start = start + (moved - node.local)
        node.local = start
        if steps > trial.ahead:
            picks = node.supply.take(steps - trial.ahead, batch)
            node.local, more = self._bench.local_steps(start, node.momentum, picks, rate)
            right = right + more
        self._samples += steps * batch
        return Submission(
            number,
            node.base.version,
            node.local - node.base.weights,
            samples=steps * batch,
            quality=float(right) / (steps * batch),
            rate=max(rate * steps, 1e-9),
        )


def _supplies(bench: Workbench, trial: Trial) -> list[_Supply]:
    """Deal the samples out to the nodes."""
    generator = torch.Generator().manual_seed(trial.seed)
    count = len(bench.train_set.labels)
    order = torch.randperm(count, generator=generator).to(bench.train_set.labels.device)
    held = trial.held or apportion(trial.speeds, count)
    return [_Supply(part, generator) for part in order.split(list(held))]
