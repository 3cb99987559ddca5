"""Unpack what Convoy needs into a folder: for machines on which nothing can be installed.

python tools/unpack_wheels.py .device --python 3.12 --there torch numpy pillow
PYTHONPATH=src:.device python3 -m convoy doctor      # there

The folder is ignored by git. It holds the versions of constraints.txt, and pytest.
"""

import argparse
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
WANTED = ("convoy-train", "pytest", "pytest-timeout", "pytest-rerunfailures")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def needed_by(names: list[str], known: set[str]) -> set[str]:
    """Add these packages, and all that they need here, to those that are known; return all."""
    for name in map(canonicalize_name, names):
        if name in known:
            continue
        known.add(name)
        wanted = [Requirement(text) for text in requires(name) or []]
        more = [w.name for w in wanted if not w.marker or w.marker.evaluate({"extra": ""})]
        needed_by(more, known)
    return known


def main() -> None:
    """Unpack the wheels."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the Python there")
    parser.add_argument("--there", nargs="*", default=["torch", "numpy"], help="is there already")
    given = parser.parse_args()
    there = {"convoy-train", *map(canonicalize_name, given.there)}
    names = needed_by(list(WANTED), there - {"convoy-train"}) - there
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--only-binary", ":all:", "--python-version", given.python, *platforms]
    command += ["--target", str(given.folder), "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*command, *sorted(names)], check=True)  # noqa: S603 - names of packages
    print(f"{len(names)} packages are in {given.folder}")


if __name__ == "__main__":
    main()
