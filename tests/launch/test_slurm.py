"""Batch scripts: what they ask Slurm for, and that they train where Slurm is played by stubs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from convoy.errors import ConfigError
from convoy.launch.slurm import SlurmJob, batch_script, job_name
from tests.conftest import Outcome

STUBS = {
    # Takes Slurm's options off, notes them and runs the rest, as one task on this machine.
    "srun": 'while [[ "$1" == --* ]]; do echo "$1" >> srun.log; shift; done\nexec "$@"',
    "scontrol": "echo hosta\necho hostb",
    "getent": 'echo "127.0.1.1 STREAM $2"',  # a machine that knows itself by loopback only
    "hostname": 'echo "127.0.0.1 10.0.0.9"',
    "sleep": "exec /bin/sleep 0.05",
}


def make(**changes: Any) -> SlurmJob:
    """Return a job with some values changed."""
    values = {"run_file": "/data/run.toml", "python": "/venv/python", "name": "run", "nodes": 4}
    return SlurmJob(**{**values, **changes})


def directives(script: str) -> set[str]:
    """Return what a script asks Slurm for."""
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH " in line}


def check_syntax(script: str) -> None:
    """Fail where bash cannot read a script, or shellcheck finds fault where it is installed."""
    for command in (["bash", "-n"], ["shellcheck", "-S", "warning", "-"]):
        if shutil.which(command[0]):
            done = subprocess.run(
                command, input=script, text=True, capture_output=True, timeout=30, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": 1},
        {"nodes": 2, "gpus": 1},
        {"gpus": 4, "cpus": 8},
        {"gpus": 8, "cpus": 2},
        {"partition": "short,long-2", "time": "2-03:04:05"},
        {"run_file": "/a b/it's $(here) `x`.toml", "python": "/my venv/python"},
    ],
)
def test_scripts_are_faultless_bash(changes: dict[str, Any]) -> None:
    check_syntax(batch_script(make(**changes)))


def test_what_was_given_is_asked_for_and_nothing_else() -> None:
    always = {
        "--job-name=run",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--output=%x-%j.out",
        "--open-mode=append",
        "--signal=B:TERM@60",
        "--requeue",
    }
    assert directives(batch_script(make())) == always
    more = make(partition="gpu", time="01:00:00", cpus=8, gpus=2)
    assert directives(batch_script(more)) == always | {
        "--partition=gpu",
        "--time=01:00:00",
        "--cpus-per-task=8",
        "--gpus-per-node=2",
    }


def test_directives_stand_before_the_first_command() -> None:
    lines = batch_script(make()).splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any("#SBATCH" in line for line in lines[first:])


def test_one_machine_has_nobody_to_join() -> None:
    assert "convoy join" not in batch_script(make(nodes=1))


def test_every_gpu_of_the_other_machines_joins() -> None:
    script = batch_script(make(gpus=4, cpus=8))
    assert "--nodes=3 --ntasks=12 --ntasks-per-node=4 --cpus-per-task=2" in script
    assert '--device "cuda:$SLURM_LOCALID"' in script


@pytest.mark.parametrize(
    "path", ["/a b.toml", "/$(id).toml", "/it's.toml", "/@NODES@@PYTHON@", "/"]
)
def test_paths_arrive_as_they_are(path: str) -> None:
    script = batch_script(make(run_file=path))
    line = next(line for line in script.splitlines() if line.startswith("run_file="))
    shown = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "$run_file"'],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert shown.stdout == path


@pytest.mark.parametrize(
    "time", ["5", "90:00", "01:00:00", "100:00:00", "1-0", "1-12:30", "1-12:30:15"]
)
def test_all_of_slurms_times_are_taken(time: str) -> None:
    assert f"--time={time}" in directives(batch_script(make(time=time)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 0}, "'nodes' is out of range; got 0; allowed: 1 to 64"),
        ({"nodes": 65}, "'nodes' is out of range"),
        ({"cpus": -1}, "'cpus' is out of range"),
        ({"gpus": 65}, "'gpus' is out of range"),
        ({"time": ""}, "'time' is not as Slurm writes it"),
        ({"time": "1:2:3:4"}, "'time' is not as Slurm writes it"),
        ({"time": "1\n#SBATCH --x"}, "'time' is not as Slurm writes it"),
        ({"partition": ""}, "'partition' is no partition's name"),
        ({"partition": "a\n#SBATCH --x"}, "'partition' is no partition's name"),
        ({"run_file": "/a\nb"}, "the run file's path cannot be printed"),
        ({"python": "/a\nb"}, "the interpreter's path cannot be printed"),
    ],
)
def test_values_that_slurm_would_not_understand_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        batch_script(make(**changes))


@pytest.mark.parametrize(
    ("stem", "name"),
    [("run", "run"), ("my run", "my-run"), ("../x", "x"), ("日本", "convoy"), ("a" * 99, "a" * 60)],
)
def test_a_job_is_named_after_its_run_file(stem: str, name: str) -> None:
    assert job_name(stem) == name


# ---------------------------------------------------------------- the command, and real runs


def test_the_command_prints_the_script_or_writes_it_to_be_run(convoy: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("epochs = 1\n")
    printed: Outcome = convoy("slurm", "run.toml", "--nodes", 2)
    written: Outcome = convoy("slurm", "run.toml", "--nodes", 2, "--out", "job.sh")
    assert (printed.code, printed.err, written.code, written.out) == (0, "", 0, "")
    assert printed.out == (tmp_path / "job.sh").read_text()
    assert (tmp_path / "job.sh").stat().st_mode & 0o777 == 0o755
    assert "sbatch job.sh" in written.err
    assert f"run_file={tmp_path}/run.toml" in printed.out
    assert f"python={sys.executable}" in printed.out


# Stands for the interpreter: notes what it is called with, and plays the lead or a node.
ACTOR = r"""
while [ "$1" != convoy ]; do shift; done
kind=$2
echo "$*" >> calls.log
for file in .convoy-*.token; do stat -c "%a %s" "$file" >> token.log; done
trap "echo $kind >> asked.log; exit 130" TERM
touch "$kind.there"
if [ "$kind" = join ]; then
  [ -e stays ] || exit 0
elif [ ! -e waits ]; then
  while [ -e stays ] && [ ! -e join.there ]; do sleep 0.05; done
  exit "$(cat code)"
fi
while true; do sleep 0.05; done
"""


def _start_job(tmp_path: Path) -> subprocess.Popen[str]:
    stubs = tmp_path / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        _write_script(stubs / name, body)
    environment = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NAME": "run",
        "SLURM_JOB_ID": str(os.getpid()),  # the port follows from it
        "SLURM_JOB_NODELIST": "host[a-b]",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        ["bash", "job.sh"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )


def _write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def _end_of(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Return a job's exit code and all it said; nothing of it is left."""
    try:
        said, _ = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        said, _ = job.communicate(timeout=10)
        pytest.fail(f"the job hangs: {said}")
    return job.returncode, said


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def _act(tmp_path: Path, code: int = 0, *, wishes: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a job whose lead and nodes are played."""
    _write_script(tmp_path / "actor", ACTOR)
    (tmp_path / "code").write_text(str(code))
    for wish in wishes:
        (tmp_path / wish).touch()
    script = batch_script(make(python=str(tmp_path / "actor"), nodes=2))
    (tmp_path / "job.sh").write_text(script)
    return _start_job(tmp_path)


def _calls(tmp_path: Path) -> list[str]:
    """Return what the lead and the node were called with, in this order."""
    return sorted((tmp_path / "calls.log").read_text().splitlines(), reverse=True)


def test_a_new_job_leads_a_new_run_and_the_other_machine_joins_it(tmp_path: Path) -> None:
    code, said = _end_of(_act(tmp_path))
    assert code == 0, said
    lead, join = _calls(tmp_path)
    port, token = 20000 + os.getpid() % 10000, f"{tmp_path}/.convoy-{os.getpid()}.token"
    assert lead == (
        f"convoy lead /data/run.toml --out runs/run --host 127.0.0.1 --port {port} "
        f"--token-file {token} --trusted-network --nodes auto --min-nodes 2"
    )
    assert join == f"convoy join 127.0.0.1:{port} --token-file {token} --reconnect-s 120"
    assert set((tmp_path / "token.log").read_text().splitlines()) == {"600 64"}
    assert not list(tmp_path.glob(".convoy-*"))


def test_a_requeued_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "runs/run/checkpoints/step-00000050").mkdir(parents=True)
    code, said = _end_of(_act(tmp_path))
    assert code == 0, said
    assert _calls(tmp_path)[0].startswith("convoy lead --resume runs/run --host")


def test_a_run_without_a_checkpoint_is_put_aside_and_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "runs/run/config.toml").write_text("epochs = 1\n")
    code, said = _end_of(_act(tmp_path))
    assert code == 0, said
    assert _calls(tmp_path)[0].startswith("convoy lead /data/run.toml --out runs/run --host")
    (aside,) = (tmp_path / "runs").iterdir()
    assert aside.name.startswith("run.")
    assert (aside / "config.toml").is_file()


def test_when_time_is_nearly_over_the_lead_alone_is_asked_to_stop(tmp_path: Path) -> None:
    job = _act(tmp_path, wishes=("waits",))
    _wait_for(tmp_path / "lead.there")
    _wait_for(tmp_path / "join.there")
    job.send_signal(signal.SIGTERM)
    code, said = _end_of(job)
    assert code == 130, said
    assert (tmp_path / "asked.log").read_text().split() == ["lead"]
    assert not list(tmp_path.glob(".convoy-*"))


def test_a_lead_that_fails_ends_the_job_with_its_code_and_leaves_nobody(tmp_path: Path) -> None:
    code, said = _end_of(_act(tmp_path, code=4, wishes=("stays",)))
    assert code == 4, said
    assert "join" in (tmp_path / "asked.log").read_text()
    assert not list(tmp_path.glob(".convoy-*"))


def test_a_job_trains_on_two_machines(convoy: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('epochs = 1\nallocation = "uniform"\nthreads = 1\n')
    assert convoy("slurm", "run.toml", "--nodes", 2, "--out", "job.sh").code == 0
    code, said = _end_of(_start_job(tmp_path))
    assert code == 0, said
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert (summary["state"], summary["epochs"], summary["nodes"]) == ("finished", 1, 2)
    asked = (tmp_path / "srun.log").read_text().split()
    lead = ["--nodes=1", "--ntasks=1", "--nodelist=hosta"]
    join = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--exclude=hosta"]
    assert sorted(asked) == sorted([*lead, *join])
