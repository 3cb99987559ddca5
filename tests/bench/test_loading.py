"""The loading benchmark compares like with like."""

import pytest
import torch

from convoy.bench import loading


def test_it_measures_both_and_restores_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_COUNT", 256)
    torch.set_num_threads(2)
    told: list[str] = []
    report = loading.bench_loading(quick=True, tell=told.append)
    assert torch.get_num_threads() == 2
    assert [row.system for row in report.rows] == ["convoy", "DataLoader"]
    assert report.bars[0].value == report.rows[0].median
    assert len(told) == report.repeats == 3
