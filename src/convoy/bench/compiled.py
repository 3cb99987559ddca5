"""The peer torch.compile: forward and loss compiled and captured, and the update in two ways."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.compiling import compile_for_one_size
from convoy.inner.optimizer import make_optimizer

UPDATES = ("fused update", "compiled update")
_CAPTURING = "reduce-overhead"  # captures CUDA graphs of what was compiled


def compiled_step(
    model: nn.Module,
    way: Arithmetic,
    config: Config,
    update: str,
    options: Mapping[str, bool] | None = None,
) -> Callable[[Batch, float], object]:
    """Return a training step whose forward and backward pass torch.compile has made.

    Args:
        model: it is on its device.
        way: how to compute.
        config: of the optimizer.
        update: "fused update": torch's fused SGD, launched; "compiled update": its step is
            compiled and captured too, with the rate in a tensor.
        options: of the compiler, on a CPU.

    Raises:
        Exception: of torch's, in the first step: the network cannot be compiled as a whole.
    """
    is_bf16 = way.precision == "bf16"
    mode = _CAPTURING if way.device.type == "cuda" else None

    def loss_of(images_nchw: Tensor, labels: Tensor) -> Tensor:
        # Written out: a context that is made elsewhere could break the compiled graph in two.
        with torch.autocast(way.device.type, dtype=torch.bfloat16, enabled=is_bf16):
            return functional.cross_entropy(model(images_nchw), labels)

    model.train()
    # As a whole: what the compiler cannot follow, it would leave to eager PyTorch without a word.
    settings = {"mode": mode} if options is None else {"options": dict(options)}
    forward = compile_for_one_size(loss_of, fullgraph=True, **settings)
    optimizer = make_optimizer(model, config)
    if update == UPDATES[0]:
        set_rate, move = _set_number(optimizer), optimizer.step
    else:
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=torch.tensor(config.lr, device=way.device),
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
        set_rate, move = _fill_tensor(optimizer), compile_for_one_size(optimizer.step, mode=mode)

    def step(batch: Batch, rate: float) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        forward(batch.images_NCHW, batch.labels).backward()
        set_rate(rate)
        move()

    return step


def _set_number(optimizer: torch.optim.Optimizer) -> Callable[[float], None]:
    def set_rate(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    return set_rate


def _fill_tensor(optimizer: torch.optim.Optimizer) -> Callable[[float], None]:
    def set_rate(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"].fill_(rate)

    return set_rate
