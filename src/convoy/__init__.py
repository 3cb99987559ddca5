"""Convoy trains convolutional networks on machines that are not equal.

>>> import convoy
>>> run = convoy.fit("lenet5", "fashion-mini", epochs=5)  # doctest: +SKIP
>>> run.accuracy  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoy.config import Config
    from convoy.data.images import ImageSet
    from convoy.errors import ConvoyError
    from convoy.run import Run
    from convoy.trainer import fit, train

__version__ = "0.1.0"
__all__ = ["fit", "train", "Config", "Run", "ImageSet", "ConvoyError", "__version__"]

# Imported on first use, so that `import convoy` and `convoy --help` never wait for torch.
_HOMES = {
    "fit": "convoy.trainer",
    "train": "convoy.trainer",
    "Config": "convoy.config",
    "Run": "convoy.run",
    "ImageSet": "convoy.data.images",
    "ConvoyError": "convoy.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'convoy' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
