"""Make the embedded data set: the first 1,000 + 200 images of each class of Fashion-MNIST.

    python tools/make_fashion_mini.py FOLDER_WITH_THE_FOUR_IDX_FILES

The result is the same to the byte each time; its digest is checked in the tests.
"""

import sys
from pathlib import Path

import numpy as np

from convoy.data.sources.idx import FASHION_CLASSES, find_idx_files, read_idx

TARGET = Path(__file__).parents[1] / "src/convoy/data/embedded/fashion-mini.npz"


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Return the sorted indices of the first `count` samples of every class."""
    picked = [np.flatnonzero(labels == number)[:count] for number in range(10)]
    return np.sort(np.concatenate(picked))


def main(folder: Path) -> None:
    """Read the four IDX files and write the small set."""
    files = find_idx_files([folder])
    if files is None:
        raise SystemExit(f"{folder} does not hold the four IDX files")
    arrays = {"classes": np.array(FASHION_CLASSES)}
    for part, count in (("train", 1000), ("test", 200)):
        labels = read_idx(files[f"{part}-labels"])
        picked = first_of_each_class(labels, count)
        arrays[f"x_{part}"] = read_idx(files[f"{part}-images"])[picked]
        arrays[f"y_{part}"] = labels[picked]
    np.savez_compressed(TARGET, **arrays)  # type: ignore[arg-type]
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
