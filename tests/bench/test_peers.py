"""The peers: each trains for real, the oracle trains exactly, and nothing stays behind."""

import os
import signal
from contextlib import suppress

import psutil
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from convoy.bench.peers import Task, available, ddp, measure_crew, measure_nodes
from convoy.bench.peers.alone import Samples, make_model
from convoy.bench.peers.crew import Crew, Link
from convoy.config import Config
from convoy.errors import ConfigError, ConvoyError, EnvironmentProblem
from convoy.inner.optimizer import make_optimizer

TINY = Task("lenet5", (1, 28, 28), classes=10, batch=16, shares=(10, 6))
PATIENCE_S = 60.0


@pytest.mark.parametrize(
    ("system", "ratio"),
    [("alone", None), ("ddp", 1), ("ddp-oracle", 10 / 6), ("torchft", 1)],
)
def test_a_crew_has_a_speed(system: str, ratio: float | None) -> None:
    assert available(system) is None
    first, second = measure_nodes(system, TINY, None, warm_s=0.1, seconds=0.2)
    assert first > 0
    assert second > 0
    assert ratio is None or first / second == pytest.approx(ratio)


def test_a_batch_that_cannot_be_divided_alike_is_still_whole() -> None:
    assert Task("lenet5", (1, 28, 28), 10, batch=11, shares=(5, 3, 3)).equal_shares == (4, 4, 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_oracle_learns_what_one_process_learns_from_the_whole_batch(compiled: bool) -> None:
    task = Task("lenet5", (1, 28, 28), 10, 16, (11, 5), precision="fp64", compiled=compiled)
    with ddp.open_store() as address:
        given = [(task, node, address) for node in range(2)]
        with Crew(_learn_three_steps, given) as crew:
            found = crew.receive(PATIENCE_S)
    assert found[0] == found[1]
    expected = _weights_of_one_process(task)
    torch.testing.assert_close(torch.tensor(found[0], dtype=torch.float64), expected)


def _learn_three_steps(link: Link, task: Task, node: int, address: str) -> None:
    with ddp.group(address, node, task.num_nodes):
        model = make_model(task)
        loop = ddp.make_loop(task, node, task.shares, model)
        for _ in range(3):
            loop.step()
        link.send(_flat(model).tolist())


def _weights_of_one_process(task: Task) -> Tensor:
    model = make_model(task)
    optimizer = make_optimizer(model, task.config)
    parts = [Samples(task, node, share) for node, share in enumerate(task.shares)]
    before = _flat(model)
    for _ in range(3):
        images, labels = map(torch.cat, zip(*(part.take() for part in parts), strict=True))
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert not torch.equal(before, _flat(model))
    return _flat(model)


def _flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_ddp_reaches_an_accuracy_and_stops_there() -> None:
    config = Config(model="lenet5", batch=64, epochs=8, lr=0.1, target_accuracy=0.6, threads=1)
    curve = ddp.train_ddp(config, (40, 24), None)
    seconds, accuracies = zip(*curve, strict=True)
    assert list(seconds) == sorted(seconds)
    assert accuracies[-1] >= 0.6
    assert all(accuracy < 0.6 for accuracy in accuracies[:-1])


@pytest.mark.parametrize("size", [1, 7, 16, 250, 256])
def test_every_sample_of_a_batch_goes_to_one_node(size: int) -> None:
    spans = ddp.split_batch(size, (102, 77, 51, 26))
    assert [place for start, stop in spans for place in range(start, stop)] == list(range(size))


def test_a_whole_batch_is_divided_as_told() -> None:
    assert [b - a for a, b in ddp.split_batch(256, (102, 77, 51, 26))] == [102, 77, 51, 26]


def _fail_on_one(link: Link, node: int) -> None:
    link.send("ready")
    if node == 1:
        raise RuntimeError("the disk is on fire")
    link.receive()


def test_a_failure_of_a_node_is_told_in_words() -> None:
    with Crew(_fail_on_one, [(0,), (1,)]) as crew:
        crew.receive(PATIENCE_S)
        pids = crew.pids
        with pytest.raises(ConvoyError, match="node 1 failed: RuntimeError: the disk is on fire"):
            crew.receive(PATIENCE_S)
        crew.send("end")
    _assert_gone(pids)


def _die(link: Link) -> None:
    link.send("ready")
    os.write(2, b"out of patience\n")
    os._exit(7)


def test_a_death_of_a_node_is_told_with_its_last_words() -> None:
    with Crew(_die, [()]) as crew:
        crew.receive(PATIENCE_S)
        with pytest.raises(ConvoyError, match=r"node 0 died with exit code 7.*out of patience"):
            crew.receive(PATIENCE_S)


def _have_a_child(link: Link) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    link.send(child)
    link.receive()


def test_no_process_outlives_an_error_of_the_parent() -> None:
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError):
        _fail_with_a_crew(pids)
    assert len(pids) == 4
    _assert_gone(pids)


def _fail_with_a_crew(pids: list[int]) -> None:
    with Crew(_have_a_child, [(), ()]) as crew:
        pids += crew.pids + crew.receive(PATIENCE_S)
        assert all(psutil.pid_exists(pid) for pid in pids)
        raise ZeroDivisionError


def test_silence_is_told() -> None:
    with Crew(_have_a_child, [()]) as crew:
        crew.receive(PATIENCE_S)
        with pytest.raises(ConvoyError, match=r"no answer within 0.01 s from the nodes \[0\]"):
            crew.receive(0.01)
        crew.send("end")


def _assert_gone(pids: list[int]) -> None:
    """Fail unless these processes end at once; what init has yet to bury has ended."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                process.wait(PATIENCE_S)


class _Places:
    """A lab that only remembers."""

    def __init__(self) -> None:
        self.placed: list[tuple[int, int]] = []

    def place(self, node: int, pid: int) -> None:
        self.placed.append((node, pid))


def test_a_node_is_placed_with_all_that_it_has_started() -> None:
    lab = _Places()
    with Crew(_have_a_child, [(), ()]) as crew:
        children = crew.receive(PATIENCE_S)
        crew.place(lab)
        expected = [(node, pid) for node in (0, 1) for pid in (crew.pids[node], children[node])]
        crew.send("end")
    assert lab.placed == expected
    _assert_gone(children)


def test_a_system_that_is_not_installed_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.bench.peers.find_spec", lambda name: None)
    reason = available("hivemind")
    assert reason is not None
    assert "not installed" in reason
    with pytest.raises(EnvironmentProblem, match="hivemind is not installed"):
        measure_crew("hivemind", TINY, None, warm_s=0.1, seconds=0.1)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="horovod"):
        available("horovod")
