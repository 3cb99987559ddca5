"""Prepare on a GPU what comes next, while it still works on what came before."""

from collections.abc import Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


def made_ahead(items: Iterator[T], device: torch.device) -> Iterator[T]:
    """Yield items of tensors, each made on a side stream while the one before is used.

        main stream:   | use 0        | use 1        | use 2
        side stream:   make 0 | make 1       | make 2       | make 3

    Making waits for all use that is queued by then, so that memory which was given back here
    is written again only when nobody reads it any more. (`Tensor.record_stream` would promise
    the same, but memory marked so is not freed any more after a capture has failed.)
    """
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def make() -> T | None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            return next(items, None)

    coming = make()
    try:
        while coming is not None:
            main.wait_stream(side)
            present, coming = coming, make()
            yield present
    finally:
        main.wait_stream(side)  # what it reads may be given back as soon as nobody asks for more
