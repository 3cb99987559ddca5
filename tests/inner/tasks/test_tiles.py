"""The loops over a matrix unit's tiles, on machines that have none, and on those that have one."""

import subprocess
from pathlib import Path

import torch

from convoy.inner.tasks.engine import load_engine
from tests.inner.tasks.compiler import compile_with_engine

_PROGRAM = Path(__file__).with_name("tiles.cpp")


def test_products_in_tiles_and_in_vectors_are_those_of_the_formulas(tmp_path: Path) -> None:
    program = tmp_path / "tiles"
    compile_with_engine("-O2", "-march=native", str(_PROGRAM), "-o", str(program))
    done = subprocess.run([program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.endswith("products of tiles, 0 failures")
    assert int(last.split()[0]) > 1000
    load_engine()
    assert ("with a real matrix unit, too" in done.stdout) == torch.ops.convoy.matrix_tiles()


def test_a_real_matrix_units_instructions_are_known_to_the_assembler(tmp_path: Path) -> None:
    source = tmp_path / "unit.cpp"
    source.write_text(
        '#include "products.h"\n'
        "using Products = convoy::TileProducts<convoy::Amx>;\n"
        "using convoy::Half;\n"
        "void step(const convoy::Walk& w, const Half* x, const Half* f, float* y) {\n"
        "  Products::Turn turn;\n"
        "  Products::multiply(w, x, f, 64, y);\n"
        "  Products::correlate(x, 64, f, f, 64, y, 144, 16);\n"
        "}\n"
    )
    listing = tmp_path / "unit.s"
    compile_with_engine(
        "-O2", "-mamx-tile", "-mamx-bf16", "-mavx512f", "-S", str(source), "-o", str(listing)
    )
    compile_with_engine("-c", "-x", "assembler", str(listing), "-o", str(tmp_path / "unit.o"))
    text = listing.read_text()
    for name in ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert name in text
