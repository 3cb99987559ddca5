"""Threads that have nothing else to do take pieces of other threads' tasks."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from convoy.data.batches import Batch
from convoy.inner.tasks import engines
from convoy.inner.tasks.convolutions import Hands
from convoy.inner.tasks.engine import find_hands
from convoy.inner.tasks.report import make_report
from convoy.inner.tasks.step import Grain
from convoy.inner.tasks.timeline import Timeline
from convoy.models.zoo import build_model
from tests.inner.tasks.compiler import compile_with_engine, has_thread_sanitizer
from tests.inner.tasks.nets import CLASSES, gradients_of, make_batch, make_twins, threads

_PROGRAM = Path(__file__).with_name("pieces.cpp")


@pytest.mark.parametrize("how", ["-O2", "-fsanitize=thread"])
def test_every_piece_is_done_once_whoever_helps(how: str, tmp_path: Path) -> None:
    if how != "-O2" and not has_thread_sanitizer():
        pytest.skip("this compiler cannot watch threads")
    program = tmp_path / "pieces"
    compile_with_engine(how, "-g", "-pthread", str(_PROGRAM), "-o", str(program))
    done = subprocess.run([program], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all pieces done\n"), done.stderr


@pytest.mark.parametrize(("precision", "tiles"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_a_group_alone_is_helped_with_and_stays_the_same_bit_by_bit(
    precision: str, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_hands().lanes == 0:
        pytest.skip("only our own convolutions are in pieces")
    monkeypatch.setattr(engines, "find_hands", lambda: Hands(16, tiles))
    made = make_batch(0, 32, (3, 32, 32), torch.float32)
    images = made.images_NCHW.contiguous(memory_format=torch.channels_last)
    batch = Batch(images, made.labels, made.keys)
    found: list[tuple[Timeline, dict[str, Tensor]]] = []
    for count in (1, 2):
        model = build_model("resnet20", (3, 32, 32), CLASSES, 0)
        twins = make_twins(
            model, Grain(1, count), precision=precision, layout="channels_last", tolerance=1
        )
        with threads(count):
            for _ in range(100):  # somebody else may have the other core for a while
                twins.tasks.gradients(batch, 32)
                timeline = twins.tasks.last_timeline()
                assert timeline is not None
                if timeline.helps or count == 1:
                    found.append((timeline, gradients_of(twins.tasks.model)))
                    break
    (alone, before), (together, after) = found
    assert alone.helps == ()
    assert together.helps
    assert all(torch.equal(gradient, after[name]) for name, gradient in before.items())
    spans = {span.task: span for span in together.spans}
    for piece in together.helps:
        helped = spans[piece.task]
        assert piece.thread != helped.thread
        assert helped.start_s <= piece.start_s < piece.end_s
    assert make_report(together).helps == len(together.helps)
