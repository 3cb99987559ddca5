"""What a config means for the parameter service: rule, work and terms, with presets filled in.

The strategies `agwu` and `sgwu` are the paper's own: its rule, its IDPA, one exchange for each
pass over what a node holds. Whatever the user has asked for otherwise stays as asked for.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from convoy.config import SERVICE_STRATEGIES, Config
from convoy.errors import ConfigError
from convoy.memory.rooms import Rooms
from convoy.outer.allocation.idpa import Mode
from convoy.outer.holdings import EVERY_PASS, HeldWork
from convoy.outer.rules.bound import least_bound
from convoy.outer.rules.catalog import make_rule, parse_rule
from convoy.outer.server import ParameterServer
from convoy.outer.work import FollowWork, Stream, StreamWork, Terms, Work


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The service's settings, none of them left open."""

    rule: str
    by_speed: bool
    every: int
    local_batch: int
    holdings: Literal["none"] | Mode
    bound: int | None


def plan_service(config: Config, nodes: int) -> ServicePlan:
    """Fill in what the strategy and the rule suggest."""
    is_preset = config.strategy in ("agwu", "sgwu")
    rule = config.strategy if is_preset and config.rule == "beat" else config.rule
    choice, _ = parse_rule(rule)
    holdings = config.holdings
    if is_preset and holdings == "none":
        holdings = "cumulative"
    every = config.exchange_every
    if every == 0 and holdings != "none":
        every = EVERY_PASS
    equal = max(1, config.batch // max(1, nodes))
    by_share = choice.by_speed and holdings == "none"
    return ServicePlan(
        rule=rule,
        by_speed=choice.by_speed,
        every=every,
        local_batch=config.local_batch or (0 if by_share else equal),
        holdings=holdings,
        bound=config.staleness_bound if config.staleness_bound >= 0 else None,
    )


def check_service(config: Config, nodes: int) -> None:
    """Refuse settings of the service that cannot work, before anything is trained."""
    if config.strategy not in SERVICE_STRATEGIES:
        return
    plan = plan_service(config, nodes)
    make_rule(plan.rule, nodes)
    if plan.bound is not None and plan.bound < least_bound(nodes):
        raise ConfigError(
            "'staleness_bound' cannot be kept by so many nodes",
            got=plan.bound,
            allowed=f"at least {least_bound(nodes)} with {nodes} nodes",
        )
    if plan.holdings == "none" and plan.every == EVERY_PASS:
        raise ConfigError(
            "an exchange for each pass needs samples that a node keeps",
            hint="Give --holdings cumulative, or a number for --exchange-every.",
        )
    if plan.holdings != "none" and config.idpa_batches > config.epochs:
        raise ConfigError(
            "'idpa_batches' is more than there are epochs",
            got=config.idpa_batches,
            allowed=f"at most {config.epochs}",
        )


def make_server(
    config: Config,
    vector: Tensor,
    weights: int,
    samples: int,
    nodes: int,
    done: int = 0,
    *,
    hands_out: bool = True,
    rooms: Rooms | None = None,
) -> ParameterServer:
    """Return the parameter server of a run, or one of several that share its weights.

    Args:
        config: of the run.
        vector: weights and statistics to start from.
        weights: how many numbers are weights.
        samples: in the data set.
        nodes: that are expected.
        done: samples that are in the weights already.
        hands_out: it is the one that hands out work.
        rooms: where memory for new weights comes from.
    """
    plan = plan_service(config, nodes)
    server = ParameterServer(
        make_rule(plan.rule, nodes),
        _make_work(config, plan, samples, nodes, done) if hands_out else FollowWork(),
        vector,
        weights,
        samples,
        first_version=config.first_version,
        bound=plan.bound,
        rooms=rooms,
    )
    server.done = done
    return server


def _make_work(config: Config, plan: ServicePlan, samples: int, nodes: int, done: int) -> Work:
    if plan.holdings == "none":
        terms = Terms(
            batch=config.batch,
            local_batch=plan.local_batch,
            every=plan.every,
            overlap=config.overlap,
            min_share=min(config.min_share, config.batch),
        )
        return StreamWork(Stream(samples, config.epochs, done), terms)
    held = HeldWork(
        samples,
        config.epochs,
        batches=config.idpa_batches,
        mode=plan.holdings,
        local_batch=plan.local_batch,
        every=plan.every,
        expect=nodes,
        sent=config.stream_data,
    )
    held.restore({"finished": done, "nodes": nodes})
    return held
