"""Under torchrun: each process finds its place, rank 0 leads, and the job is the same."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.config import Config
from convoy.errors import ConfigError, EnvironmentProblem
from convoy.launch.torchrun import (
    Placement,
    announced,
    find_lead,
    options_of_lead,
    order_of_rank,
    read_placement,
    threads_of,
)
from tests.faults.team import free_port

ENVIRON = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host.example",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def place(**changes: str) -> Placement:
    """Return the placement of a process with some variables changed."""
    placement = read_placement({**ENVIRON, **changes})
    assert placement is not None
    return placement


# ---------------------------------------------------------------- where a process is


def test_a_place_is_read_from_the_variables_of_torchrun() -> None:
    assert place() == Placement(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        host="host.example",
        port=29500,
        agent_has_store=True,
        key="convoy/abc/2/lead",
    )
    assert not place().is_lead
    assert not place().is_one_machine
    assert place(RANK="0").is_lead
    assert place(LOCAL_WORLD_SIZE="8").is_one_machine


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_without_rank_or_world_size_a_process_trains_by_itself(missing: str) -> None:
    assert read_placement({k: v for k, v in ENVIRON.items() if k != missing}) is None
    assert read_placement({}) is None


def test_one_process_trains_by_itself_under_torchrun_too() -> None:
    assert read_placement({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    "missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_a_variable_that_torchrun_would_have_set_is_missed(missing: str) -> None:
    environ = {k: v for k, v in ENVIRON.items() if k != missing}
    with pytest.raises(ConfigError, match=f"but {missing} is not.*unset RANK"):
        read_placement(environ)
    with pytest.raises(ConfigError, match=f"but {missing} is not"):
        read_placement({**environ, missing: ""})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("RANK", "x"),
        ("RANK", "²"),
        ("RANK", "9" * 5000),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "1.5"),
        ("WORLD_SIZE", str(1 << 21)),
        ("LOCAL_RANK", "4"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "9"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "http"),
    ],
)
def test_what_torchrun_would_not_set_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not what torchrun sets; got .*allowed"):
        place(**{name: value})


@pytest.mark.parametrize("value", ["False", "", "true", "1"])
def test_only_torchruns_own_word_says_that_its_agent_has_the_store(value: str) -> None:
    assert not place(TORCHELASTIC_USE_AGENT_STORE=value).agent_has_store


def test_processes_started_again_meet_elsewhere() -> None:
    assert place().key != place(TORCHELASTIC_RESTART_COUNT="3").key
    assert place().key != place(TORCHELASTIC_RUN_ID="other").key


# ---------------------------------------------------------------- what each has to do


@pytest.mark.parametrize(
    ("cores", "local", "threads"), [(8, "4", 2), (9, "4", 2), (2, "4", 1), (64, "8", 8)]
)
def test_processes_of_a_machine_divide_its_cores(cores: int, local: str, threads: int) -> None:
    placement = place(LOCAL_WORLD_SIZE=local)
    assert threads_of(placement, Config(), cores) == threads
    assert threads_of(placement, Config(threads=3), cores) == 3


@pytest.mark.parametrize("nodes", ["auto", "none", 1, 8])
def test_the_lead_has_one_node_like_every_rank(nodes: object) -> None:
    config = Config(nodes=nodes)  # type: ignore[arg-type]
    assert options_of_lead(place(RANK="0"), config, 8) == {"nodes": 1, "threads": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speeds": "1,1"}, "'speeds' has no place under torchrun"),
        ({"devices": "cpu"}, "'devices' has no place under torchrun"),
        ({"allocation": "fixed", "shares": "1,2"}, "'shares' has no place under torchrun"),
        ({"strategy": "single"}, "'single' has one node; got 8"),
        ({"nodes": 4}, "disagree on the number of nodes; got 4; allowed: auto or 8"),
        ({"min_nodes": 9}, "'min_nodes' is more than there will be; got 9; allowed: at most 8"),
    ],
)
def test_options_that_torchrun_decides_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options_of_lead(place(RANK="0"), Config(**options), 8)


def test_a_rank_joins_with_its_part_of_the_machine() -> None:
    config = Config(data_dir="d", cache_dir="c")
    order = order_of_rank(place(), config, ("host:1", "token"), cores=8, gpus=0)
    assert (order.lead, order.token, order.name, order.slot) == ("host:1", "token", "rank 5", -1)
    assert (order.device, order.threads) == ("auto", 2)
    assert (order.data_dir, order.cache_dir) == ("d", "c")


@given(
    local_rank=st.integers(0, 3), gpus=st.integers(0, 8), device=st.sampled_from(["auto", "cuda"])
)
def test_a_rank_takes_the_gpu_of_its_number(local_rank: int, gpus: int, device: str) -> None:
    placement = place(LOCAL_RANK=str(local_rank))
    order = order_of_rank(placement, Config(device=device), ("h:1", "t"), cores=1, gpus=gpus)
    assert order.device == (f"cuda:{local_rank % gpus}" if gpus else device)


@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_a_device_that_was_asked_for_is_kept(device: str) -> None:
    order = order_of_rank(place(), Config(device=device), ("h:1", "t"), cores=1, gpus=4)
    assert order.device == device


# ---------------------------------------------------------------- meeting


def _local(port: str, rank: int) -> Placement:
    return place(
        RANK=str(rank),
        LOCAL_WORLD_SIZE="8",
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE="False",
    )


def test_ranks_learn_where_their_own_lead_is_and_no_other() -> None:
    port = str(free_port())
    with announced(_local(port, 0)) as serving:
        assert (serving.host, serving.expect, serving.open_to_others) == ("127.0.0.1", 8, True)
        found = find_lead(_local(port, 3), timeout_s=10)
        assert found == (f"127.0.0.1:{serving.port}", serving.token)
        later = place(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RESTART_COUNT="3")
        with pytest.raises(EnvironmentProblem, match=r"rank 5 heard nothing of rank 0 within 0\.2"):
            find_lead(later, timeout_s=0.2)


def test_a_store_that_cannot_be_opened_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with (
            pytest.raises(EnvironmentProblem, match=f"store cannot be reached.*127.0.0.1:{port}"),
            announced(_local(port, 0)),
        ):
            pass


# ---------------------------------------------------------------- all together


def test_a_job_runs_under_torchrun_and_rank_0_alone_tells_of_it(tmp_path: Path) -> None:
    options = ["--epochs", "1", "--allocation", "uniform", "--out", "run", "--json", "--quiet"]
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "convoy", "train"]
    done = subprocess.run(
        [sys.executable, *command, *options],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert summary["nodes"] == 2
    assert summary["state"] == "finished"
    assert summary["strategy"] == "lockstep"
    assert summary["faults"] == 0
    assert {row["name"] for row in summary["node_table"]} == {"node 1", "rank 1"}
    assert all(row["samples"] > 0 for row in summary["node_table"])
    assert (tmp_path / "run/summary.json").is_file()
    assert "convoy:" not in done.stderr
