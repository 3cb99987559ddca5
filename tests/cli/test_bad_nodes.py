"""Bad input about nodes, for train, lead, join and slurm: one clear line, nothing left behind."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Refused

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    """Put a token file and a run file beside every case."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    (tmp_path / "run.toml").write_text("epochs = 1\n")


def case(identity: str, line: str, *words: str, code: int = 2) -> Any:
    """Return a case of a wrong command line."""
    return pytest.param(line.split(), words, code, id=identity)


NODES = [
    case("nodes a word", "--nodes many", "'nodes'", "'many'", "whole number or auto, none"),
    case("nodes a fraction", "--nodes 1.5", "'nodes'", "'1.5'"),
    case("nodes empty", "--nodes=", "'nodes'", "''"),
    case("nodes low", "--nodes=-2", "'nodes'", "-2", "at least -1"),
    case("nodes high", "--nodes 65", "'nodes'", "65", "at most 64"),
    case("nodes and speeds", "--nodes 3 --speeds 1,1", "disagree", "nodes: 3, speeds: 2"),
    case("nodes and devices", "--nodes 3 --devices cpu", "disagree", "nodes: 3, devices: 1"),
    case("speeds and devices", "--speeds 1 --devices cpu,cpu", "speeds: 1, devices: 2"),
    case(
        "nodes and shares",
        "--nodes 3 --allocation fixed --shares 1,2",
        *("disagree", "nodes: 3, shares: 2"),
    ),
    case("single with two", "--strategy single --nodes 2", "'single'", "got 2", "lockstep"),
    case("single with speeds", "--strategy single --speeds 1,1", "'single'", "got 2", "lockstep"),
    case("strategy misspelt", "--strategy lockstop", "'lockstop'", "'lockstep'?"),
    case("speed zero", "--speeds 1,0", "'speeds'", "out of range", "above 0"),
    case("speed negative", "--speeds=1,-1", "'speeds'", "out of range", "at least 0"),
    case("speed nan", "--speeds 1,nan", "'speeds'", "out of range", "finite"),
    case("speed infinite", "--speeds 1,inf", "'speeds'", "out of range", "finite"),
    case("speed a word", "--speeds 1,fast", "'speeds'", "list of numbers", "'1,fast'"),
    case("speed too small to hold", "--speeds 1e-6", "speed", "1e-06", "0.001"),
    case("speeds too many", "--speeds " + ",".join("1" * 65), "'speeds'", "at most 64"),
    case("changes of nobody", "--speed-changes 1:1@1", "'speed_changes'", "--speeds"),
    case("changes a word", "--speeds 1 --speed-changes soon", "'soon'", "NODE:SPEED@SECONDS"),
    case("changes without time", "--speeds 1 --speed-changes 1:0.5", "'1:0.5'", "NODE:SPEED"),
    case("changes of a word", "--speeds 1 --speed-changes 1:x@1", "'1:x@1'", "NODE:SPEED"),
    case("changes of node 0", "--speeds 1 --speed-changes 0:1@1", "'0:1@1'", "from 1"),
    case("changes of node 2", "--speeds 1 --speed-changes 2:1@1", "not there", "got 2", "1 to 1"),
    case("change to zero", "--speeds 1 --speed-changes 1:0@1", "speed", "got 0.0"),
    case("change at nan", "--speeds 1 --speed-changes 1:1@nan", "got nan", "from 0"),
    case("change before", "--speeds 1 --speed-changes 1:1@-1", "got -1.0", "from 0"),
    case("devices unknown", "--devices gpu,cpu", "unknown device", "'gpu'", "cuda:N"),
    case("devices with a gap", "--devices cpu,,cpu", "unknown device", "''"),
    case("devices of no use", "--devices meta", "unknown device", "'meta'"),
    case("allocation misspelt", "--allocation sped", "--allocation", '"sped"', '"speed"?'),
    case("shares without fixed", "--shares 1,2", "'shares'", "--allocation fixed"),
    case("fixed without shares", "--allocation fixed", "'shares'", "--allocation fixed"),
    case("shares of nothing", "--allocation fixed --shares 0,0", "'shares'", "not all be 0"),
    case("shares negative", "--allocation fixed --shares=1,-1", "'shares'", "at least 0"),
    case("shares nan", "--allocation fixed --shares 1,nan", "'shares'", "finite"),
    case("shares a word", "--allocation fixed --shares a,b", "'shares'", "list of numbers"),
    case("min-share low", "--min-share 0", "'min_share'", "got 0", "at least 1"),
    case("min-share high", "--min-share 4097", "'min_share'", "at most 4096"),
    case("min-share a fraction", "--min-share 1.5", "--min-share", '"1.5"'),
    case("min-nodes low", "--min-nodes 0", "'min_nodes'", "got 0", "at least 1"),
    case("min-nodes high", "--min-nodes 65", "'min_nodes'", "at most 64"),
    case("min-nodes a word", "--min-nodes auto", "--min-nodes", '"auto"'),
    case("wire misspelt", "--wire fp16", "--wire", '"fp16"', '"bf16"?'),
    case("overlap a word", "--overlap=maybe", "--overlap", '"maybe"'),
    case("restarts low", "--restarts=-1", "'restarts'", "at least 0"),
    case("restarts high", "--restarts 1001", "'restarts'", "at most 1000"),
    case("node-timeout low", "--node-timeout-s 0", "'node_timeout_s'", "at least 0.5"),
    case("node-timeout nan", "--node-timeout-s nan", "'node_timeout_s'", "nan"),
    case("quorum-timeout low", "--quorum-timeout-s 0.5", "'quorum_timeout_s'", "at least 1"),
    case("quorum-timeout infinite", "--quorum-timeout-s inf", "'quorum_timeout_s'", "inf"),
]


@pytest.mark.parametrize(("arguments", "words", "code"), NODES)
def test_train_and_lead_refuse_alike(
    refused: Refused, arguments: list[str], words: tuple[str, ...], code: int
) -> None:
    refused("train", *arguments, words=words, code=code)
    refused("lead", "--token-file", "token", "--port", 0, *arguments, words=words, code=code)


ALONE = [
    case("nobody trains", "train --nodes none", "somebody must train", "convoy lead"),
    case("min-nodes of two", "train --nodes 2 --min-nodes 3", "'min_nodes'", "at most 2"),
    case("min-nodes of speeds", "train --speeds 1,1 --min-nodes 3", "'min_nodes'", "at most 2"),
    case("min-nodes of devices", "train --devices cpu --min-nodes 2", "'min_nodes'", "at most 1"),
    case("train has no port", "train --port 1", "--port"),
    case("train has no host", "train --host x", "--host"),
]


@pytest.mark.parametrize(("arguments", "words", "code"), ALONE)
def test_train_has_only_its_own_nodes(
    refused: Refused, arguments: list[str], words: tuple[str, ...], code: int
) -> None:
    refused(*arguments, words=words, code=code)


@pytest.mark.parametrize("command", [("train",), ("lead", "--token-file", "token", "--port", "0")])
@pytest.mark.parametrize("devices", ["cuda:0", "cpu,cuda", "cpu,cuda:7"])
def test_devices_that_are_not_there(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], devices: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    missing = devices.rsplit(",", 1)[-1]
    refused(*command, "--devices", devices, words=("no such GPU", f"'{missing}'"), code=3)


LEAD = [
    case("no token file", "lead", "--token-file"),
    case("all addresses", "lead --token-file token --host 0.0.0.0", "'0.0.0.0'", "one address"),
    case("empty host", "lead --token-file token --host=", "one address"),
    case(
        "all addresses of a trusted network",
        "lead --token-file token --host 0.0.0.0 --trusted-network",
        *("'0.0.0.0'", "one address"),
    ),
    case("not loopback", "lead --token-file token --host 192.0.2.1", "--trusted-network"),
    case("TLS is no leave", "lead --token-file token --tls --host 192.0.2.1", "--trusted-network"),
    case("host not known", "lead --token-file token --host no.such.host.invalid", "not known"),
    case("port low", "lead --token-file token --port=-1", "'port'", "-1", "0 to 65535"),
    case("port high", "lead --token-file token --port 99999", "'port'", "99999", "0 to 65535"),
    case("port a word", "lead --token-file token --port http", "--port", '"http"'),
    case("run file missing", "lead none.toml --token-file token", "does not exist", "'none.toml'"),
    case("resume and file", "lead a.toml --resume b --token-file token", "has its own config"),
    case("resume nothing", "lead --resume none --token-file token --port 0", "holds no run"),
    case("token file in no folder", "lead --token-file none/token", "cannot be written"),
    case("token file a folder", "lead --token-file .", "cannot be read", "'.'"),
]


@pytest.mark.parametrize(("arguments", "words", "code"), LEAD)
def test_wrong_lead(
    refused: Refused, arguments: list[str], words: tuple[str, ...], code: int
) -> None:
    refused(*arguments, words=words, code=code)


ADDRESS = "not HOST:PORT"
JOIN = [
    case("no address", "join --token-file token", "LEAD"),
    case("no token file", "join 127.0.0.1:1", "--token-file"),
    case("no port", "join 127.0.0.1 --token-file token", ADDRESS, "'127.0.0.1'"),
    case("no host", "join :29600 --token-file token", ADDRESS, "':29600'"),
    case("port empty", "join host: --token-file token", ADDRESS),
    case("port zero", "join host:0 --token-file token", ADDRESS),
    case("port high", "join host:65536 --token-file token", ADDRESS),
    case("port a word", "join host:http --token-file token", ADDRESS),
    case("port negative", "join host:-1 --token-file token", ADDRESS),
    case("token file missing", "join 127.0.0.1:1 --token-file none", "cannot be read", "'none'"),
    case(
        "certificate missing",
        "join 127.0.0.1:1 --token-file token --certificate none",
        *("certificate cannot be read", "'none'"),
    ),
    case(
        "certificate a token",
        "join 127.0.0.1:1 --token-file token --certificate token",
        *("holds no certificate", "'token'"),
    ),
    case("device unknown", "join 127.0.0.1:1 --token-file token --device gpu", "'gpu'"),
    case("threads a word", "join 127.0.0.1:1 --token-file token --threads x", '"x"'),
    case("lead's option", "join 127.0.0.1:1 --token-file token --nodes 2", "--nodes"),
]


@pytest.mark.parametrize(("arguments", "words", "code"), JOIN)
def test_wrong_join(
    refused: Refused, arguments: list[str], words: tuple[str, ...], code: int
) -> None:
    refused(*arguments, words=words, code=code)


@pytest.mark.parametrize("command", ["lead", "join"])
@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (TOKEN, 0o644, ("others may read", "chmod 600")),
        (TOKEN, 0o660, ("others may read", "chmod 600")),
        ("", 0o600, ("holds no token", "at least 16")),
        ("short", 0o600, ("holds no token", "at least 16")),
        ("two words of enough letters", 0o600, ("holds no token",)),
        ("\x00" * 64, 0o600, ("holds no token",)),
    ],
)
def test_wrong_token_file(
    refused: Refused, tmp_path: Path, command: str, content: str, mode: int, words: tuple[str, ...]
) -> None:
    (tmp_path / "token").write_text(content)
    (tmp_path / "token").chmod(mode)
    lead = ["127.0.0.1:1"] if command == "join" else []
    refused(command, *lead, "--token-file", "token", words=("token", *words))


SLURM = [
    case("no run file", "slurm --nodes 2", "RUN_FILE"),
    case("no nodes", "slurm run.toml", "--nodes"),
    case("run file missing", "slurm none.toml --nodes 2", "does not exist", "'none.toml'"),
    case("run file a folder", "slurm . --nodes 2", "is a folder"),
    case("nodes zero", "slurm run.toml --nodes 0", "'nodes'", "got 0", "1 to 64"),
    case("nodes high", "slurm run.toml --nodes 65", "'nodes'", "1 to 64"),
    case("nodes a word", "slurm run.toml --nodes auto", "--nodes", '"auto"'),
    case("nodes a fraction", "slurm run.toml --nodes 1.5", "--nodes", '"1.5"'),
    case("cpus negative", "slurm run.toml --nodes 2 --cpus=-1", "'cpus'", "0 to 4096"),
    case("cpus a fraction", "slurm run.toml --nodes 2 --cpus 0.5", "--cpus", '"0.5"'),
    case("gpus high", "slurm run.toml --nodes 2 --gpus 65", "'gpus'", "0 to 64"),
    case("time a word", "slurm run.toml --nodes 2 --time soon", "'time'", "'soon'"),
    case("time half", "slurm run.toml --nodes 2 --time 1:", "'time'", "'1:'"),
    case("time negative", "slurm run.toml --nodes 2 --time=-1", "'time'", "'-1'"),
    case("partition of a shell", "slurm run.toml --nodes 2 --partition $(id)", "'partition'"),
    case("partition empty", "slurm run.toml --nodes 2 --partition=", "'partition'"),
    case("out nowhere", "slurm run.toml --nodes 2 --out none/job.sh", "cannot be written"),
    case("out a folder", "slurm run.toml --nodes 2 --out .", "cannot be written"),
]


@pytest.mark.parametrize(("arguments", "words", "code"), SLURM)
def test_wrong_slurm(
    refused: Refused, arguments: list[str], words: tuple[str, ...], code: int
) -> None:
    refused(*arguments, words=words, code=code)


@pytest.mark.parametrize("value", ["a\nb", "a b", "-p", "a;b", "a,,b", "ä"])
def test_a_partition_cannot_leave_its_line(refused: Refused, value: str) -> None:
    refused("slurm", "run.toml", "--nodes", 2, f"--partition={value}", words=("'partition'",))


def test_slurm_checks_the_run_file(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("epoch = 1\n")
    refused("slurm", "run.toml", "--nodes", 2, words=("unknown option 'epoch'", "'epochs'?"))


PLACE = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("changes", "line", "words"),
    [
        ({"MASTER_ADDR": ""}, "", ("MASTER_ADDR", "unset RANK")),
        ({"RANK": "2"}, "", ("RANK", "'2'", "0 to 1")),
        ({}, "--speeds 1,1", ("'speeds'", "torchrun")),
        ({}, "--devices cpu,cpu", ("'devices'", "torchrun")),
        ({}, "--allocation fixed --shares 1,2", ("'shares'", "torchrun")),
        ({}, "--strategy single", ("'single'", "got 2", "torchrun")),
        ({}, "--nodes 3", ("disagree", "got 3", "auto or 2")),
        ({}, "--min-nodes 3", ("'min_nodes'", "at most 2")),
        ({}, "--epochs 0", ("'epochs'", "at least 1")),
    ],
)
def test_wrong_train_under_torchrun(
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    line: str,
    words: tuple[str, ...],
) -> None:
    for name, value in {**PLACE, **changes}.items():
        monkeypatch.setitem(os.environ, name, value)
    refused("train", *line.split(), words=words)
