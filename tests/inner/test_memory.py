"""Freed memory is kept: tensors of the next step find their pages already there."""

import resource

import torch

from convoy.inner.memory import keep_freed_memory


def page_faults_of_new_tensors() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(4 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_new_tensors_reuse_the_pages_of_freed_ones() -> None:
    assert keep_freed_memory()
    page_faults_of_new_tensors()
    pages = 20 * (4 << 20) // 4096
    assert page_faults_of_new_tensors() < pages / 10
