"""`convoy watch`: what it refuses, and a real one from start to end."""

import http.client
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.monitor.dashboard.address import listen
from convoy.monitor.dashboard.feed import GONE
from convoy.monitor.dashboard.key import key_path
from convoy.storage.runfolder import RunFolder
from tests.conftest import Outcome, start_convoy
from tests.monitor.dashboard.browser import Listener, ask
from tests.monitor.dashboard.lines import append, make_finished_run, start, step
from tests.monitor.dashboard.process import read_link, watching_process
from tests.monitor.dashboard.test_address import make_certificate, trusting

Convoy = Callable[..., Outcome]


def refused(outcome: Outcome, *words: str, code: int = 2) -> bool:
    is_one_line = outcome.err.startswith("convoy: error: ") and outcome.err.count("\n") == 1
    return outcome.code == code and is_one_line and all(word in outcome.err for word in words)


def test_no_run_at_all(convoy: Convoy) -> None:
    assert refused(convoy("watch"), "there is no run below runs/", "Give a run's folder")


def test_no_such_run(convoy: Convoy) -> None:
    assert refused(convoy("watch", "nowhere"), "no such run", "'nowhere'", "convoy runs list")


def test_a_folder_that_is_no_run(convoy: Convoy, tmp_path: Path) -> None:
    assert refused(convoy("watch", tmp_path), "holds no run of Convoy")


def test_away_from_loopback_without_tls(convoy: Convoy, tmp_path: Path) -> None:
    run = make_finished_run(tmp_path / "run")
    assert refused(convoy("watch", run, "--host", "192.0.2.1"), "needs TLS", "ssh -L")


def test_half_of_tls(convoy: Convoy, tmp_path: Path) -> None:
    run = make_finished_run(tmp_path / "run")
    assert refused(convoy("watch", run, "--certificate", "c.pem"), "together or not at all")


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_what_is_no_port(convoy: Convoy, tmp_path: Path, port: str) -> None:
    run = make_finished_run(tmp_path / "run")
    assert refused(convoy("watch", run, f"--port={port}"), "out of range")


def test_a_port_that_is_in_use(convoy: Convoy, tmp_path: Path) -> None:
    run = make_finished_run(tmp_path / "run")
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        outcome = convoy("watch", run, "--port", port)
    assert refused(outcome, f"port {port} is in use", code=3)


def test_help_does_not_show_what_is_for_ourselves(convoy: Convoy) -> None:
    shown = convoy("watch", "--help").out
    assert "--open" in shown
    assert "--beside" not in shown


def test_a_finished_run_from_start_to_end(tmp_path: Path) -> None:
    run = make_finished_run(tmp_path / "<script>alert(1)</script>".replace("/", "-"))
    with watching_process(run, "--port=0") as watch:
        assert watch.link.startswith(f"http://127.0.0.1:{watch.port}/enter?token=")
        snapshot = json.loads(ask(watch.port, "/api/snapshot", headers=watch.cookie).body)
        assert snapshot["run"]["state"] == "finished"
        assert snapshot["run"]["name"] == run.name
        assert ask(watch.port, "/", headers=watch.cookie).status == 200
        with Listener(watch.port, watch.cookie) as listener:
            assert listener.message()["reset"] is True
            fresh = read_link(watch.process)  # told when the first was used
            assert ask(watch.port, fresh[4]).status == 303
            watch.process.send_signal(signal.SIGINT)
            _, rest = watch.process.communicate(timeout=20)
        assert watch.process.returncode == 0
        assert rest.count("\n") == 1  # the link after the second was used, and nothing else
        assert "enter?token=" in rest
    assert [path.name for path in run.iterdir()] == ["events.jsonl"]  # nothing was written


def test_the_cookie_is_good_after_a_restart(tmp_path: Path) -> None:
    run = make_finished_run(tmp_path / "run")
    with watching_process(run, "--port=0") as first:
        port, cookie = first.port, first.cookie
    with watching_process(run, "--port", port) as second:
        assert second.cookie == cookie
        assert ask(port, "/api/snapshot", headers=cookie).status == 200
    key = key_path(Path(os.environ["XDG_CACHE_HOME"], "convoy", "watch"), run)
    assert key.stat().st_mode & 0o777 == 0o600


def test_the_newest_run_is_the_usual_one(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old", "older"]):
        run = make_finished_run(tmp_path / "runs" / name)
        os.utime(run / "events.jsonl", (1e9 - age, 1e9 - age))
    with watching_process("--port=0") as watch:
        snapshot = json.loads(ask(watch.port, "/api/snapshot", headers=watch.cookie).body)
        assert snapshot["run"]["name"] == "new"


def test_a_run_that_goes_on_and_is_then_killed(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.create()
        append(folder.events, start(), step(100))
        with watching_process(folder.path, "--port=0") as watch:
            with Listener(watch.port, watch.cookie) as listener:
                listener.until_samples(100)
                assert folder._lock is not None
                folder._lock.close()  # as the end of its process does
                while (message := listener.message())["sections"]["run"]["state"] != "gone":
                    pass
            assert message["sections"]["run"]["reason"] == GONE


def test_sigterm_ends_it_quietly(tmp_path: Path) -> None:
    with watching_process(make_finished_run(tmp_path / "run"), "--port=0") as watch:
        watch.process.terminate()
        assert watch.process.wait(20) == 0


def test_a_page_over_tls(tmp_path: Path) -> None:
    run = make_finished_run(tmp_path / "run")
    certificate, key = make_certificate(tmp_path)
    files = ("--certificate", certificate, "--key-file", key)
    with start_convoy("watch", run, "--port=0", "--host=localhost", *files) as process:
        try:
            link = read_link(process)
            assert link[1] == "https"
            connection = http.client.HTTPSConnection(
                "localhost", int(link[3]), timeout=20, context=trusting(certificate)
            )
            connection.request("GET", link[4])
            answer = connection.getresponse()
            assert answer.status == 303
            assert "secure" in (answer.getheader("set-cookie") or "").lower()
            connection.close()
        finally:
            process.kill()
