"""Memory: how much there is, and how to keep what tensors gave back instead of returning it."""

import ctypes

import psutil
import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of options in glibc's malloc.h
_LARGEST_KEPT = 32 << 20  # glibc allows no more
_KEPT_AT_MOST = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed memory; return whether this system could be told.

    By default every tensor above 128 KiB is mapped anew and zeroed page by page, at each step
    again. Keeping the pages made LeNet-5 11 to 25 % faster on two cores (docs/results.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None: what this process has loaded
    if mallopt is None:
        return False
    told = (mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT), mallopt(_TRIM_THRESHOLD, _KEPT_AT_MOST))
    return all(told)


def free_memory(device: torch.device) -> int:
    """Return how many bytes a device has to give; nodes of one machine share them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
