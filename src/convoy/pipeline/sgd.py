"""SGD for the stages of a pipeline: late gradients, rates of their own, and a look ahead."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from convoy.config import Config
from convoy.pipeline.recipe import Recipe, rate_factor, reach, weights_of_update

_BUFFER = "momentum_buffer"
_FACTOR = "factor"


class StageSGD(optim.SGD):
    """SGD with one parameter group for each stage that is computed here.

    Args:
        parts: the weights of each stage.
        leads: updates that each stage's gradients come late.
        recipe: what is done about it.
        config: rate, momentum and weight decay.

    A stage without a lead is moved as plain SGD moves it, bit for bit.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[nn.Parameter]],
        leads: Sequence[int],
        recipe: Recipe,
        config: Config,
    ) -> None:
        self.recipe = recipe
        groups: list[dict[str, Any]] = [
            {"params": list(part), "lead": lead, _FACTOR: None}
            for part, lead in zip(parts, leads, strict=True)
        ]
        super().__init__(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._set_factors(0.0)
        # The rate of the last update, on the device: a recorded step must find it there.
        device = next((p.device for part in parts for p in part), torch.device("cpu"))
        self._last_rate = torch.zeros((), device=device, dtype=_dtype_of_rate(device))

    def begin_segment(self, rate: float, epochs_done: float) -> None:
        """Go on after an update of this rate, at this point of the run."""
        self._last_rate.fill_(rate)
        self.begin_update(epochs_done)

    def begin_update(self, epochs_done: float) -> None:
        """Give each stage the rate that is its own at this point of the run."""
        if self.recipe.annealed:
            self._set_factors(epochs_done)

    def _set_factors(self, epochs_done: float) -> None:
        for group in self.param_groups:
            if not group["params"]:  # all are frozen
                continue
            factor = rate_factor(self.recipe, group["lead"], epochs_done)
            if group[_FACTOR] is not None:
                group[_FACTOR].fill_(factor)
            elif factor != 1.0 or (self.recipe.annealed and group["lead"]):
                # On the device, so that a recorded step reads what it is by then.
                device = group["params"][0].device
                group[_FACTOR] = torch.tensor(factor, device=device, dtype=_dtype_of_rate(device))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the weights by the gradients."""
        del closure
        groups = self.param_groups
        rates = [group["lr"] for group in groups]
        if self.recipe.backward == "predicted":
            self._last_rate.fill_(rates[0])
        try:
            for group in groups:
                group["lr"] = self._rate(group, group["lr"])
            for group in filter(self._is_compensated, groups):
                self._compensate(group)
            self.param_groups = [g for g in groups if not self._is_compensated(g)]
            super().step()
        finally:
            self.param_groups = groups
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    @torch.no_grad()
    def predicted(self, stage: int, updates: int, rate: float | Tensor) -> list[Tensor] | None:
        """Return where a stage's weights will be some updates on; None: where they are."""
        group = self.param_groups[stage]
        ahead = reach(self.recipe.forward, updates, group["momentum"])
        return self._moved(group, -ahead, rate) if ahead and group["params"] else None

    @torch.no_grad()
    def recalled(self, stage: int) -> list[Tensor]:
        """Return an estimate of the weights that a forward pass read, `lead` updates ago."""
        group = self.param_groups[stage]
        back = reach("linear", group["lead"], group["momentum"])
        if not group["params"]:
            return []
        return self._moved(group, back, self._last_rate)

    def _moved(self, group: dict[str, Any], times: float, rate: float | Tensor) -> list[Tensor]:
        change = torch._foreach_mul([self._velocity(p) for p in group["params"]], times)
        torch._foreach_mul_(change, self._rate(group, rate))
        return list(torch._foreach_add([p.data for p in group["params"]], change))

    @staticmethod
    def _rate(group: dict[str, Any], rate: float | Tensor) -> float | Tensor:
        if group[_FACTOR] is None:
            return rate
        own: Tensor = group[_FACTOR] * rate
        return own

    def _is_compensated(self, group: dict[str, Any]) -> bool:
        wanted = self.recipe.compensated and group["lead"] and group["momentum"]
        return bool(wanted and group["params"])

    def _compensate(self, group: dict[str, Any]) -> None:
        used = [p for p in group["params"] if p.grad is not None]
        weights = [p.data for p in used]
        gradients = [p.grad for p in used if p.grad is not None]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        velocity = [self._velocity(p) for p in used]
        torch._foreach_mul_(velocity, group["momentum"])
        torch._foreach_add_(velocity, gradients)
        of_velocity, of_gradient = weights_of_update(
            group["lead"], group["momentum"], nesterov=group["nesterov"]
        )
        change = torch._foreach_mul(velocity, of_velocity)
        torch._foreach_add_(change, gradients, alpha=of_gradient)
        torch._foreach_mul_(change, group["lr"])
        torch._foreach_sub_(weights, change)

    def _velocity(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if state.get(_BUFFER) is None:
            state[_BUFFER] = torch.zeros_like(parameter.data)
        found: Tensor = state[_BUFFER]
        return found


def _dtype_of_rate(device: torch.device) -> torch.dtype:
    """Return the type of a rate on a device: the fused update reads fp32 on a GPU."""
    return torch.float32 if device.type == "cuda" else torch.float64
