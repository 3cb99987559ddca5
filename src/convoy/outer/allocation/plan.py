"""The plan for the next steps: every node's share, and who had better stay out.

A step lasts as long as its slowest node is busy, and the exchange on top:

    T(shares) = max_j share_j / speed_j + exchange

Shares in proportion to speed make all nodes finish together. A node stays out where the step
would be shorter without it, because its smallest share takes too long or because the exchange
costs more than the node brings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.outer.allocation.shares import apportion, apportion_within

Policy = Literal["speed", "uniform", "fixed"]

_WORTH_CHANGING = 1.03  # shares stay as they are unless a step becomes 3 % shorter
_WORTH_LEAVING = 1.03  # a node goes only where a step becomes 3 % shorter without it
_CLEARLY_WORTH_LEAVING = 1.5  # the same, where speeds are known from short probes only
_STANDSTILL = 1e-9  # samples per second: a speed that nothing is divided by zero with
_WORTH_CALLING = 1.05  # a node that stood aside comes back only where a step becomes 5 % shorter


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A node that costs more than it brings, and why, in words."""

    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Shares of a whole batch in the order of the nodes, and those that had better stay out.

    Attributes:
        shares: samples of a batch for each node; a node that is left out has 0.
        step_s: how long a step is expected to last.
        left_out: the nodes that cost more than they bring.
    """

    shares: tuple[int, ...]
    step_s: float
    left_out: tuple[LeftOut, ...] = ()

    def shares_of(self, total: int, smallest: int) -> tuple[int, ...]:
        """Return the shares of a batch, which may be the epoch's last and smaller than others."""
        if total == sum(self.shares):
            return self.shares
        return apportion(self.shares, total, smallest)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a plan must keep to.

    Attributes:
        batch: samples of a step.
        min_share: the smallest share that is not 0.
        policy: shares by measured speed, all equal, or in fixed proportions.
        proportions: the fixed proportions, one for each node.
        min_nodes: so many nodes stay, whatever they cost.
        most: samples that each node has the memory for; (): nobody has asked.
    """

    batch: int
    min_share: int = 8
    policy: Policy = "speed"
    proportions: tuple[float, ...] = ()
    min_nodes: int = 1
    most: tuple[int, ...] = ()

    def can_hold(self, nodes: Sequence[int]) -> bool:
        """Tell whether some nodes together have the memory for a batch."""
        return not self.most or sum(self.most[node] for node in nodes) >= self.batch

    @property
    def smallest(self) -> int:
        """Return the smallest share that is not 0; whoever sets shares by hand may go lower."""
        return self.min_share if self.policy == "speed" else 1


def make_plan(
    speeds: Sequence[float],
    rules: Rules,
    *,
    exchange_s: float = 0.0,
    current: Plan | None = None,
) -> Plan:
    """Return the plan for nodes of these speeds (samples per second).

    The current plan is kept unless a new one is clearly better, so that noise in the measured
    speeds does not make the shares flutter. Without one the speeds are guesses, and a node is
    left out only if it would slow the others down very much.
    """
    if rules.policy != "speed":
        weights = rules.proportions if rules.policy == "fixed" else [1.0] * len(speeds)
        shares = apportion(weights, rules.batch, rules.smallest)
        return Plan(shares, step_time(shares, speeds, exchange_s))
    margin = _CLEARLY_WORTH_LEAVING if current is None else _WORTH_LEAVING
    best = _best_plan(speeds, rules, exchange_s, margin)
    if current is None or best.left_out:
        return best
    as_now = step_time(current.shares, speeds, exchange_s)
    if as_now <= best.step_s * _WORTH_CHANGING:
        return Plan(current.shares, as_now)
    return best


def step_time(shares: Sequence[int], speeds: Sequence[float], exchange_s: float) -> float:
    """Predict how long a step lasts."""
    busy = [share / max(v, _STANDSTILL) for share, v in zip(shares, speeds, strict=True) if share]
    return max(busy, default=0.0) + (exchange_s if len(busy) > 1 else 0.0)


def worth_calling(
    spares: Sequence[float], speeds: Sequence[float], rules: Rules, exchange_s: float
) -> list[int]:
    """Return which of the nodes that stand aside would make the others' steps clearly shorter."""
    if not spares:
        return []
    if not speeds or rules.policy != "speed":
        return list(range(len(spares)))
    as_now = _best_plan(speeds, rules, exchange_s)
    together = _best_plan([*speeds, *spares], rules, exchange_s)
    if as_now.step_s < together.step_s * _WORTH_CALLING:
        return []
    return [i for i, share in enumerate(together.shares[len(speeds) :]) if share > 0]


def _best_plan(
    speeds: Sequence[float], rules: Rules, exchange_s: float, margin: float = _WORTH_LEAVING
) -> Plan:
    order = sorted(range(len(speeds)), key=lambda i: (-speeds[i], i))
    everyone = _plan_for(order, speeds, rules, exchange_s)
    sizes = range(max(1, rules.min_nodes), len(order))
    chosen = [order[:k] for k in sizes if rules.can_hold(order[:k])]
    fewer = [_plan_for(nodes, speeds, rules, exchange_s) for nodes in chosen]
    best = min([everyone, *fewer], key=lambda plan: plan.step_s)
    if everyone.step_s <= best.step_s * margin:
        best = everyone  # but a batch may be too small for all
    idle = [i for i in order if best.shares[i] == 0]
    spare = len(order) - max(1, rules.min_nodes)  # so many may go, the slowest first
    gone = idle[len(idle) - spare :] if len(idle) > spare else idle
    out = tuple(LeftOut(i, _why(i, speeds, rules, everyone, best)) for i in sorted(gone))
    return Plan(best.shares, best.step_s, out)


def _plan_for(
    chosen: Sequence[int], speeds: Sequence[float], rules: Rules, exchange_s: float
) -> Plan:
    weights = [speed if i in chosen else 0.0 for i, speed in enumerate(speeds)]
    if rules.most and rules.can_hold(chosen):
        shares = apportion_within(weights, rules.batch, rules.most, rules.min_share)
    else:  # where memory is short everywhere, the fastest is as good as any: it may just do
        shares = apportion(weights, rules.batch, rules.min_share)
    return Plan(shares, step_time(shares, speeds, exchange_s))


def _why(node: int, speeds: Sequence[float], rules: Rules, everyone: Plan, best: Plan) -> str:
    if everyone is best:
        return f"a batch of {rules.batch} is too small for shares of {rules.min_share} for all"
    smallest_s = rules.min_share / max(speeds[node], _STANDSTILL)
    if smallest_s > best.step_s:
        cause = f"its smallest share of {rules.min_share} samples takes {smallest_s:.3g} s"
    else:
        cause = "exchanging gradients with it costs more than it brings"
    return (
        f"{cause}: a step takes {best.step_s:.3g} s without it and {everyone.step_s:.3g} s with it"
    )
