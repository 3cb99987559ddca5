"""The wheel is complete: what it holds runs without the source tree."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_it_holds_types_data_and_licences(installed: Path) -> None:
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*")}
    assert "convoy/py.typed" in names
    assert "convoy/data/embedded/fashion-mini.npz" in names
    assert "convoy/monitor/dashboard/static/index.html" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("LICENSE-fashion-mnist") for name in names)
    assert not any(name.startswith("tests") for name in names)


def test_it_trains_on_its_own(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "convoy", "train", "--epochs=1", "--batch=500", "--json", "--quiet"],
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    probe = "import convoy; print(convoy.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(installed))  # not the source tree
