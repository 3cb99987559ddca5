"""Nodes from elsewhere take part in a run with a parameter service."""

import json
from pathlib import Path

from convoy.config import Config, read_toml
from convoy.launch.parameters.record import read_record
from convoy.launch.parameters.replay import replay
from convoy.tracking import untracked
from tests.faults.team import free_port, start_program, wait_until
from tests.launch.test_lead_join import token_file

SAMPLES = 10_000  # of fashion-mini


def test_a_node_without_the_data_joins_over_tls_and_the_run_can_be_done_again() -> None:
    """It computes with other threads and hands in rounded numbers: a replay knows both."""
    port, token = free_port(), token_file()
    lead = start_program(
        *("lead", "--strategy=server", "--data=fashion-mini", "--model=lenet5", "--epochs=1"),
        *("--nodes=1", "--threads=1", "--device=cpu", "--precision=fp32", "--out=run", "--json"),
        *("--memory-format=contiguous", "--min-nodes=2", "--wire=bf16", "--tls"),
        *(f"--port={port}", f"--token-file={token}"),
    )
    far = None
    try:
        wait_until(Path("certificate.pem").exists, lead, "the lead has a certificate", 60)
        far = start_program(
            *(
                "join",
                f"127.0.0.1:{port}",
                f"--token-file={token}",
                "--certificate=certificate.pem",
            ),
            *(
                "--stream-data",
                "--threads=2",
                "--device=cpu",
                f"--cache-dir={Path('far').resolve()}",
            ),
        )
        out, errors = lead.communicate(timeout=120)
        assert lead.returncode == 0, errors
        assert far.wait(20) == 0
    finally:
        for process in filter(None, (lead, far)):
            process.kill()
            process.communicate()
    summary = json.loads(out)
    assert summary["samples"] == SAMPLES
    assert summary["sample_bytes"] > 0
    record = Path("run/record.jsonl")
    threads = {r["node"]: r["threads"] for r in read_record(record) if r["event"] == "admit"}
    assert sorted(threads.values()) == [1, 2]
    codings = {r["coding"] for r in read_record(record) if r["event"] == "submit"}
    assert codings == {"shared", "bf16"}
    found = replay(Config(**read_toml(Path("run/config.toml"))), record, untracked)
    assert found.is_equal, found
