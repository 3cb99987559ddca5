"""torch.compile in a process that trains many networks."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

_NETWORKS = 128  # of a process, at least, and their layouts and precisions

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compile_for_one_size(function: Callable[_P, _R], **how: Any) -> Callable[_P, _R]:
    """Return a function compiled for the sizes that it is first called with.

    Args:
        function: to compile.
        how: further arguments of torch.compile.

    What is compiled is kept with a function's code, which is the same for all networks. After
    eight of them torch would go on without compiling, with a line in its log: that is meant for a
    function that is compiled again and again by mistake. Kernels for any size would be slower.
    """
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, _NETWORKS)
    return cast("Callable[_P, _R]", torch.compile(function, dynamic=False, **how))
