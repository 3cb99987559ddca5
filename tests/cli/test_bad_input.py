"""Bad input: one clear line, the right exit code, and nothing on disk lost or left behind."""

import fcntl
import gzip
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convoy.errors import CheckpointError
from convoy.storage.checkpoint import load_checkpoint
from convoy.trainer import run_training
from tests.cli.test_train import TINY, write_stripes
from tests.conftest import Outcome

Convoy = Callable[..., Outcome]
Snapshot = dict[str, bytes | None]
Refused = Callable[..., None]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user modules that a test makes to that test, and warnings on one line."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("COLUMNS", "1000")


def snapshot(root: Path) -> Snapshot:
    """Return every path below a folder, with the content of the files."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def refused(convoy: Convoy, tmp_path: Path) -> Refused:
    """Return a function that runs a command line, which must be refused in the proper way."""

    def call(*arguments: object, words: tuple[str, ...], code: int = 2) -> None:
        before = snapshot(tmp_path)
        outcome = convoy(*arguments)
        lines = [line for line in outcome.err.splitlines() if not line.startswith("warning:")]
        assert len(lines) == 1, outcome.err
        assert lines[0].startswith("convoy: error: ")
        for word in words:
            assert word in lines[0]
        assert outcome.code == code
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        assert snapshot(tmp_path) == before

    return call


def usage(identity: str, line: str, *words: str) -> Any:
    """Return a case of a wrong command line."""
    return pytest.param(line.split(), words, id=identity)


USAGE = [
    usage("flag unknown", "train --eopchs 3", "--eopchs", "Did you mean --epochs?"),
    usage("flag far from all", "train --qqqqqqq 3", "--qqqqqqq"),
    usage("flag without value", "train --epochs", "--epochs", "requires an argument"),
    usage("flag twice", "train --epochs 1 --epochs 2", "--epochs", "multiple times"),
    usage("two run files", "train a.toml b.toml", "b.toml"),
    usage("command unknown", "trian", '"trian"', "train"),
    usage("subcommand unknown", "runs shwo x", "shwo", "show"),
    usage("run file missing", "train none.toml", "does not exist", "'none.toml'"),
    usage("epochs a word", "train --epochs ten", "--epochs", '"ten"'),
    usage("epochs a fraction", "train --epochs 1.5", "--epochs", '"1.5"'),
    usage("lr a word", "train --lr fast", "--lr", '"fast"'),
    usage("switch a word", "train --nesterov=maybe", "--nesterov", '"maybe"'),
    usage("milestones a word", "train --schedule step --milestones x", "'milestones'", "'x'"),
    usage("schedule misspelt", "train --schedule cosin", "--schedule", '"cosin"', '"cosine"?'),
    usage("augment misspelt", "train --augment flipp", "--augment", '"flipp"', '"flip"?'),
    usage("precision misspelt", "train --precision fp23", "--precision", '"fp23"', '"fp32"?'),
    usage(
        "memory format misspelt",
        "train --memory-format channel_last",
        *("--memory-format", '"channel_last"', '"channels_last"?'),
    ),
    usage("model misspelt", "train --model lenet", "unknown model", "'lenet'", "'lenet5'?"),
    usage("model far from all", "train --model qqq", "unknown model", "'qqq'", "MODULE:CALLABLE"),
    usage("strategy misspelt", "train --strategy singel", "strategy", "'singel'", "'single'?"),
    usage("executor misspelt", "train --executor eagre", "executor", "'eagre'", "'eager'?"),
    usage("data misspelt", "train --data fashion-mni", "data set", "'fashion-mni'", "Did you mean"),
    usage("data path missing", "train --data ./none/here", "'./none/here'", "an existing path"),
    usage("data of an unknown user", "train --data ~nosuchuser/x", "'~nosuchuser/x'"),
    usage("data name of 5000 letters", "train --data " + "a" * 5000, "data", "aaaa"),
    usage("device unknown", "train --device gpu", "unknown device", "'gpu'", "cuda:N"),
    usage("device of no use", "train --device meta", "unknown device", "'meta'", "cuda:N"),
    usage("device number wrong", "train --device cuda:x", "unknown device", "'cuda:x'"),
    usage("image-size low", "train --image-size=-1", "'image_size'", "-1", "at least 0"),
    usage("image-size high", "train --image-size 1025", "'image_size'", "1025", "at most 1024"),
    usage("test-fraction low", "train --test-fraction 0", "'test_fraction'", "above 0"),
    usage("test-fraction high", "train --test-fraction 1", "'test_fraction'", "at most 0.9"),
    usage("max-bad low", "train --max-bad-samples=-1", "'max_bad_samples'", "-1", "at least 0"),
    usage("crop-padding low", "train --crop-padding=-1", "'crop_padding'", "at least 0"),
    usage("crop-padding high", "train --crop-padding 65", "'crop_padding'", "at most 64"),
    usage("cutout low", "train --cutout=-1", "'cutout'", "at least 0"),
    usage("cutout high", "train --cutout 1025", "'cutout'", "at most 1024"),
    usage("epochs zero", "train --epochs 0", "'epochs'", "got 0", "at least 1"),
    usage("cutout of 400 digits", "train --cutout 1" + "0" * 400, "'cutout'"),
    usage("batch zero", "train --batch 0", "'batch'", "got 0", "at least 1"),
    usage("lr negative", "train --lr -1", "'lr'", "got -1.0", "at least 0"),
    usage("lr nan", "train --lr nan", "'lr'", "got nan"),
    usage("lr infinite", "train --lr inf", "'lr'", "got inf"),
    usage("momentum low", "train --momentum=-0.1", "'momentum'", "at least 0"),
    usage("momentum one", "train --momentum 1", "'momentum'", "got 1.0", "at most 0.9999"),
    usage("weight-decay low", "train --weight-decay=-1", "'weight_decay'", "at least 0"),
    usage("smoothing low", "train --label-smoothing=-1", "'label_smoothing'", "at least 0"),
    usage("smoothing high", "train --label-smoothing 1", "'label_smoothing'", "at most 0.9"),
    usage("warmup low", "train --warmup-epochs=-1", "'warmup_epochs'", "at least 0"),
    usage(
        "milestone nan", "train --epochs 1 --schedule step --milestones nan", "'milestones'", "nan"
    ),
    usage(
        "milestone low", "train --epochs 1 --schedule step --milestones=-1", "'milestones'", "-1"
    ),
    usage("gamma zero", "train --gamma 0", "'gamma'", "above 0"),
    usage("gamma high", "train --gamma 1.1", "'gamma'", "at most 1"),
    usage("target low", "train --target-accuracy=-0.1", "'target_accuracy'", "at least 0"),
    usage("target in percent", "train --target-accuracy 90", "'target_accuracy'", "at most 1"),
    usage("stop-after low", "train --stop-after=-1", "'stop_after'", "at least 0"),
    usage("seed low", "train --seed=-1", "'seed'", "at least 0"),
    usage("threads low", "train --threads=-1", "'threads'", "at least 0"),
    usage("threads high", "train --threads 1025", "'threads'", "at most 1024"),
    usage("checkpoint-steps low", "train --checkpoint-steps=-1", "'checkpoint_steps'", "at least"),
    usage("log-interval low", "train --log-interval-s 0", "'log_interval_s'", "at least 0.1"),
    usage("nesterov at rest", "train --momentum 0", "'nesterov'", "--no-nesterov"),
    usage("warmup too long", "train --epochs 2 --warmup-epochs 3", "'warmup_epochs'", "epochs = 2"),
    usage("milestones of cosine", "train --milestones 1", "'milestones'", "--schedule step"),
    usage("milestones fall", "train --schedule step --milestones 2,1", "'milestones'", "rise"),
    usage("padding no crop", "train --augment flip --crop-padding 2", "'crop_padding'", "'flip'"),
    usage("data-dir missing", "train --data mnist --data-dir none", "'data_dir'", "'none'"),
    usage("data-dir odd", "train --data mnist --data-dir ~nosuchuser/x", "~nosuchuser/x"),
    usage("mnist not there", "train --data mnist", "'mnist'", "--data-dir", "fashion-mini"),
    usage("cifar10 not there", "train --data cifar10 --data-dir .", "'cifar10'", "Looked in: ."),
    usage("model module missing", "train --model nomod:make", "'nomod:make'", "No module named"),
    usage("data module missing", "train --data nomod:make", "'nomod:make'", "No module named"),
    usage("runs show without run", "runs show", "RUN", "requires an argument"),
    usage("runs show nothing", "runs show none", "holds no run of Convoy", "'none'"),
    usage("runs show a folder", "runs show .", "holds no run of Convoy", "'.'"),
    usage("runs list nothing", "runs list none", "no such folder of runs", "'none'"),
    usage("runs list default", "runs list", "no such folder of runs", "'runs'"),
    usage("bench without name", "bench", "NAME", "requires an argument"),
    usage("bench unknown", "bench sinlge", "unknown benchmark", "'sinlge'", "'single'?"),
    usage("resume nothing", "train --resume none", "holds no run of Convoy", "'none'"),
    usage("resume no run", "train --resume .", "holds no run of Convoy", "'.'"),
    usage("resume and out", "train --resume a --out b", "a resumed run stays", "'b'"),
    usage("resume and file", "train a.toml --resume b", "has its own config", "'a.toml'"),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE)
def test_wrong_command_line(refused: Refused, arguments: list[str], words: tuple[str, ...]) -> None:
    refused(*arguments, words=words)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_missing_gpu(refused: Refused, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    refused(
        *("train", "--device", device),
        words=("no such GPU", f"'{device}'", "0 GPU(s)", "--device cpu"),
        code=3,
    )


def test_value_with_a_line_break_is_told_on_one_line(refused: Refused) -> None:
    refused("train", "--schedule", "a\nb", words=("--schedule",))


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("CONVOY_EPOCHS", "ten", ("ten",)),
        ("CONVOY_EPOCHS", "0", ("'epochs'", "at least 1")),
        ("CONVOY_SCHEDULE", "cosin", ("cosin", "cosine")),
        ("CONVOY_NESTEROV", "perhaps", ("perhaps",)),
    ],
)
def test_wrong_environment(
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setenv(variable, value)
    refused("train", words=words)


TOML = [
    ("epoch = 3", ("unknown option 'epoch'", "run.toml", "Did you mean 'epochs'?")),
    ("[train]\nepochs = 3", ("unknown option 'train'", "run.toml")),
    ('epochs = "ten"', ("'epochs'", "whole number", "'ten'")),
    ("epochs = 1.5", ("'epochs'", "whole number", "1.5")),
    ("epochs = true", ("'epochs'", "whole number", "True")),
    ("epochs = 0", ("'epochs'", "out of range", "at least 1")),
    ("epochs = 2026-01-01", ("'epochs'", "whole number", "2026")),
    ('lr = "fast"', ("'lr'", "a number", "'fast'")),
    ("lr = nan", ("'lr'", "out of range", "nan")),
    ("lr = [0.1]", ("'lr'", "a number", "[0.1]")),
    ("nesterov = 1", ("'nesterov'", "true or false", "1")),
    ('milestones = "x"', ("'milestones'", "list of numbers", "'x'")),
    ("milestones = [[1]]", ("'milestones'", "list of numbers")),
    ("model = 5", ("'model'", "a text", "5")),
    ("out = 5", ("'out'", "a text", "5")),
    ('out = "a\\u0000b"', ("out",)),
    ('schedule = "cosin"', ("'schedule'", "'cosin'", "Did you mean 'cosine'?")),
    ('augment = "flipp"', ("'augment'", "'flipp'", "Did you mean 'flip'?")),
    ('precision = "fp23"', ("'precision'", "'fp23'", "Did you mean 'fp32'?")),
    ('memory_format = "nchw"', ("'memory_format'", "'nchw'", "channels_last")),
    ("schedule = 1", ("'schedule'", "got 1", "cosine")),
    ("epochs = = 1", ("run.toml", "not valid TOML", "line 1")),
    ("epochs = 1\nepochs = 2", ("run.toml", "not valid TOML")),
    ("\x00", ("run.toml", "not valid TOML")),
]


@pytest.mark.parametrize(("text", "words"), TOML, ids=[repr(text) for text, _ in TOML])
def test_wrong_run_file(
    refused: Refused, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "run.toml").write_text(text)
    refused("train", "run.toml", words=words)


def test_run_file_that_is_a_folder(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    refused("train", "run", words=("is a folder", "'run'", "--resume FOLDER"))


def test_run_file_that_is_not_utf8(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b'data = "caf\xe9"')
    refused("train", "run.toml", words=("cannot be read", "utf-8", "'run.toml'"))


def test_run_file_with_a_line_break_in_its_name(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "a\nb.toml").write_text("epochs = = 1")
    refused("train", "a\nb.toml", words=("not valid TOML",))


def picture(path: Path, side: int = 12, shade: int = 0) -> None:
    """Write a grey picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(shade).integers(0, 256, (side, side), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def pictures(root: Path, *folders: str, suffix: str = "png", count: int = 12) -> None:
    """Write some pictures into each of some folders."""
    for folder in folders:
        for number in range(count):
            picture(root / folder / f"{number}.{suffix}", shade=number)


def save(path: Path, **arrays: Any) -> None:
    """Write an .npz file of stripes, with some of its arrays replaced or, by None, left out."""
    write_stripes(path)
    with np.load(path) as archive:
        known = dict(archive.items())
    kept = {key: value for key, value in {**known, **arrays}.items() if value is not None}
    np.savez(path, **kept)


def _folder_empty(path: Path) -> str:
    (path / "data").mkdir()
    return "data"


def _folder_without_classes(path: Path) -> str:
    for number in range(4):
        picture(path / "data" / f"{number}.png")
    return "data"


def _folder_one_class(path: Path) -> str:
    pictures(path / "data", "cat")
    return "data"


def _folder_empty_class(path: Path) -> str:
    pictures(path / "data", "cat", "dog")
    (path / "data" / "owl").mkdir()
    return "data"


def _folder_test_class_unknown(path: Path) -> str:
    pictures(path / "data", "train/cat", "train/dog", "test/cat", "test/owl")
    return "data"


def _folder_test_only(path: Path) -> str:
    pictures(path / "data", "test/cat", "test/dog", "more/cat")
    return "data"


def _folder_sizes_differ(path: Path) -> str:
    pictures(path / "data", "cat", "dog")
    picture(path / "data" / "dog" / "large.png", side=16)
    return "data"


def _folder_one_picture_each(path: Path) -> str:
    pictures(path / "data", "cat", "dog", count=1)
    return "data"


def _folder_truncated_jpeg(path: Path) -> str:
    pictures(path / "data", "cat", "dog", suffix="jpg")
    file = path / "data" / "dog" / "3.jpg"
    file.write_bytes(file.read_bytes()[:200])
    return "data"


def _folder_text_as_png(path: Path) -> str:
    pictures(path / "data", "cat", "dog")
    (path / "data" / "cat" / "3.png").write_text("no picture")
    return "data"


def _folder_empty_file(path: Path) -> str:
    pictures(path / "data", "cat", "dog")
    (path / "data" / "cat" / "3.png").write_bytes(b"")
    return "data"


def _tar(path: Path, name: str) -> Path:
    pictures(path / "source", "cat", "dog")
    with tarfile.open(path / "plain", "w") as archive:
        archive.add(path / "source", ".")
    content = (path / "plain").read_bytes()
    (path / "plain").unlink()
    (path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    shutil.rmtree(path / "source")
    return path / name


def _tar_gz_cut(path: Path) -> str:
    file = _tar(path, "data.tar.gz")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file.name


def _tar_gz_flipped(path: Path) -> str:
    file = _tar(path, "data.tar.gz")
    content = bytearray(file.read_bytes())
    content[10:14] = b"\xff" * 4  # a kind of block that gzip does not know
    file.write_bytes(content)
    return file.name


def _tar_cut(path: Path) -> str:
    file = _tar(path, "data.tar")
    file.write_bytes(file.read_bytes()[:9000])
    return file.name


def _tar_header_damaged(path: Path) -> str:
    file = _tar(path, "data.tar")
    with tarfile.open(file) as archive:
        damaged = archive.getmembers()[-3].offset
    content = bytearray(file.read_bytes())
    content[damaged] ^= 1  # its checksum no longer fits; what follows would be lost in silence
    file.write_bytes(content)
    return file.name


def _tar_is_text(path: Path) -> str:
    (path / "data.tar").write_text("I am a text, not an archive.\n" * 100)
    return "data.tar"


def _tar_empty(path: Path) -> str:
    (path / "data.tar").write_bytes(b"")
    return "data.tar"


def _unknown_kind(path: Path) -> str:
    (path / "data.csv").write_text("1,2\n")
    return "data.csv"


def _npz_is_text(path: Path) -> str:
    (path / "data.npz").write_text("I am a text.")
    return "data.npz"


def _npz_empty(path: Path) -> str:
    (path / "data.npz").write_bytes(b"")
    return "data.npz"


def _npz_cut(path: Path) -> str:
    save(path / "data.npz")
    content = (path / "data.npz").read_bytes()
    (path / "data.npz").write_bytes(content[: len(content) // 2])
    return "data.npz"


def _npz_is_folder(path: Path) -> str:
    (path / "data.npz").mkdir()
    return "data.npz"


def _npz_is_one_array(path: Path) -> str:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((4, 12, 12), np.uint8))
    (path / "data.npz").write_bytes(buffer.getvalue())
    return "data.npz"


def arrays(**values: Any) -> Callable[[Path], str]:
    """Return a maker of an .npz file with some arrays replaced or left out."""

    def prepare(path: Path) -> str:
        save(path / "data.npz", **values)
        return "data.npz"

    return prepare


LABELS = np.arange(64) % 2
FLOATS = np.zeros((64, 1, 12, 12), np.float32)
SINGLE_NAN = np.where(np.arange(64 * 144).reshape(64, 1, 12, 12) == 7, np.nan, 0.0)

DATA: list[Any] = [
    ("folder empty", _folder_empty, ("data", "no images"), 2),
    ("folder without classes", _folder_without_classes, ("data", "class"), 2),
    ("folder of one class", _folder_one_class, ("fewer than two class folders", "cat"), 2),
    ("class empty", _folder_empty_class, ("a class folder has no images", "owl", "Fill it"), 2),
    ("test class unknown", _folder_test_class_unknown, ("classes that the training", "owl"), 2),
    ("test part only", _folder_test_only, ("no 'train' folder", "test"), 2),
    ("sizes differ", _folder_sizes_differ, ("12x12", "16x16", "--image-size"), 2),
    ("one picture each", _folder_one_picture_each, ("one sample only",), 2),
    ("jpeg truncated", _folder_truncated_jpeg, ("dog/3.jpg", "1 bad", "--max-bad-samples"), 1),
    ("png is text", _folder_text_as_png, ("cat/3.png", "1 bad", "--max-bad-samples"), 1),
    ("png empty", _folder_empty_file, ("cat/3.png", "1 bad", "--max-bad-samples"), 1),
    ("tar.gz cut", _tar_gz_cut, ("data.tar.gz", "damaged or no tar archive"), 2),
    ("tar.gz flipped", _tar_gz_flipped, ("data.tar.gz", "damaged or no tar archive"), 2),
    ("tar cut", _tar_cut, ("data.tar", "damaged or no tar archive"), 2),
    ("tar header damaged", _tar_header_damaged, ("data.tar", "damaged or no tar archive"), 2),
    ("tar is text", _tar_is_text, ("data.tar", "damaged or no tar archive"), 2),
    ("tar empty", _tar_empty, ("data.tar",), 2),
    ("unknown kind", _unknown_kind, ("no known kind", "'data.csv'", ".npz"), 2),
    ("npz is text", _npz_is_text, ("data.npz", "cannot be read as .npz"), 2),
    ("npz empty", _npz_empty, ("data.npz", "cannot be read as .npz"), 2),
    ("npz cut", _npz_cut, ("data.npz", "cannot be read as .npz"), 2),
    ("npz is folder", _npz_is_folder, ("data.npz",), 2),
    ("npz is one array", _npz_is_one_array, ("data.npz", "one array"), 2),
    ("npz pickled", arrays(labels=LABELS.astype(object)), ("data.npz", "pickle"), 2),
    ("npz without labels", arrays(labels=None), ("no training part", "labels"), 2),
    ("npz without images", arrays(images=None), ("no training part", "images"), 2),
    ("labels too few", arrays(labels=LABELS[:9]), ("differ in number", "64 and 9"), 2),
    ("labels out of range", arrays(classes=np.array(["a"])), ("label is out of range", "1"), 2),
    ("labels negative", arrays(labels=LABELS - 1), ("a label is negative", "-1"), 2),
    ("labels floats", arrays(labels=LABELS * 0.5), ("labels must be whole numbers", "float"), 2),
    ("labels words", arrays(labels=np.array(["a", "b"] * 32)), ("data.npz",), 2),
    ("test label unknown", arrays(x_test=FLOATS, y_test=LABELS + 1), ("out of range", "2"), 2),
    ("images flat", arrays(images=np.zeros((64, 144), np.uint8)), ("3 or 4 dim", "144"), 2),
    ("images of 7 channels", arrays(images=np.zeros((64, 7, 5, 9))), ("1 or 3 channels", "7"), 2),
    ("images whole", arrays(images=np.zeros((64, 12, 12), np.int32)), ("uint8 or floats",), 2),
    ("images words", arrays(images=np.full((64, 12, 12), "x")), ("data.npz",), 2),
    ("images nan", arrays(images=SINGLE_NAN), ("data.npz", "NaN"), 2),
    ("images none", arrays(images=FLOATS[:0], labels=LABELS[:0]), ("no samples",), 2),
    (
        "test images of another size",
        arrays(x_test=np.zeros((4, 9, 9), np.uint8), y_test=LABELS[:4]),
        ("differ in shape", "9"),
        2,
    ),
]


@pytest.mark.parametrize(
    ("prepare", "words", "code"), [case[1:] for case in DATA], ids=[case[0] for case in DATA]
)
@pytest.mark.parametrize("out", [(), ("--out", "deep/run")], ids=["runs", "out"])
def test_bad_data(
    refused: Refused,
    tmp_path: Path,
    prepare: Callable[[Path], str],
    words: tuple[str, ...],
    code: int,
    out: tuple[str, ...],
) -> None:
    data = prepare(tmp_path)
    refused("train", *TINY, "--data", data, *out, words=words, code=code)


def test_empty_folder_given_as_out_is_still_there_after_a_refusal(
    refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    refused("train", "--data", "none", "--out", "mine", words=("unknown data set",))
    assert (tmp_path / "mine").is_dir()


def test_pickled_objects_are_not_executed(refused: Refused, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    write_stripes(tmp_path / "data.npz")
    (tmp_path / "data.npz").write_bytes(f"cos\nsystem\n(S'touch {canary}'\ntR.".encode())
    refused("train", "--data", "data.npz", words=("data.npz", "cannot be read"))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch", 65), ("'batch' is larger", "got 65", "at most 52")),
        (("--crop-padding", 12, "--augment", "crop"), ("'crop_padding'", "12", "below 12")),
        (("--cutout", 12), ("'cutout' is as large", "12", "below 12")),
        (("--model", "vgg16"), ("too small for vgg16", "(1, 12, 12)", "32x32")),
        (("--model", "alexnet"), ("too small for alexnet", "(1, 12, 12)")),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_data(
    refused: Refused, tmp_path: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    write_stripes(tmp_path / "data.npz")
    kept = [part for pair in zip(TINY[::2], TINY[1::2], strict=True) for part in pair]
    for name in options[::2]:
        if name in kept:
            place = kept.index(name)
            del kept[place : place + 2]
    refused("train", *kept, "--data", "data.npz", *options, words=words)


MODULES = [
    ("attribute missing", "def makes(): pass", ("'mine' has no 'make'", "'makes'?")),
    ("not callable", "make = 5", ("'mine:make' is not callable", "int")),
    ("syntax error", "def make(:", ("'mine:make'", "SyntaxError")),
    ("fails on import", "raise OSError('no licence')", ("'mine:make'", "OSError: no licence")),
    ("exits on import", "raise SystemExit(7)", ("'mine:make'", "SystemExit")),
    ("fails", "def make(): return 1 / 0", ("'mine:make' failed", "ZeroDivisionError")),
    ("fails at length", "def make(): raise ValueError('a\\nb')", ("'mine:make'", "ValueError: a")),
]
MODELS = [
    ("no module", "def make(): return 5", ("must return an nn.Module", "int")),
    ("no weights", "make = lambda: nn.Flatten()", ("'mine:make' has nothing to train",)),
    ("few outputs", "make = lambda: net(1)", ("wrong output", "(2, 1)", "2 classes")),
    ("no vector", "make = lambda: nn.Conv2d(1, 2, 3)", ("wrong output", "(2, 2, 10, 10)")),
    ("no tensor", "make = lambda: Pair()", ("'mine:make'", "cannot take images")),
    ("another input", "make = lambda: nn.Conv2d(5, 2, 3)", ("(1, 12, 12)", "channels")),
    ("wants more", "def make(depth): return net(2)", ("'mine:make' failed", "depth")),
]
DATASETS = [
    ("one part", "make = lambda: [1]", ("must return two data sets", "list")),
    ("no data", "make = lambda: (5, 6)", ("the training data is of no known kind", "int")),
    ("no items", "make = lambda: ([], [])", ("training data has no samples",)),
    ("items fail", "make = lambda: ([(X, 0), None], [])", ("sample 1 of the training data",)),
    ("items differ", "make = lambda: ([(X, 0), (X[1:], 1)], [])", ("different sizes", "11")),
    ("items of words", "make = lambda: ([('x', 0), ('y', 1)], [])", ("training",)),
    ("labels differ", "make = lambda: (both, (A, L + 1))", ("not those of the training part",)),
]
MODEL_HEAD = """
from torch import nn
def net(outputs): return nn.Sequential(nn.Flatten(), nn.Linear(144, outputs))
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(2)
    def forward(self, x): return self.net(x), x
"""
DATA_HEAD = """
import numpy as np
X = np.zeros((12, 12), np.uint8)
A, L = np.zeros((64, 12, 12), np.uint8), np.arange(64) % 2
both = (A, L)
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [(text, words) for _, text, words in MODULES + MODELS],
    ids=[case[0] for case in MODULES + MODELS],
)
def test_user_model_that_is_of_no_use(
    refused: Refused, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    write_stripes(tmp_path / "data.npz")
    (tmp_path / "mine.py").write_text(MODEL_HEAD + text)
    options = [*TINY[:4], *TINY[6:], "--data", "data.npz"]
    refused("train", *options, "--model", "mine:make", words=words)


@pytest.mark.parametrize(
    ("text", "words"),
    [(text, words) for _, text, words in MODULES + DATASETS],
    ids=[case[0] for case in MODULES + DATASETS],
)
def test_user_data_that_is_of_no_use(
    refused: Refused, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(DATA_HEAD + text)
    refused("train", *TINY, "--data", "mine:make", words=words)


def _out_not_empty(path: Path) -> str:
    (path / "mine").mkdir()
    (path / "mine" / "thesis.txt").write_text("x")
    return "mine"


def _out_is_a_file(path: Path) -> str:
    (path / "mine").write_text("x")
    return "mine"


def _out_below_a_file(path: Path) -> str:
    return f"{_out_is_a_file(path)}/run"


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_out_not_empty, ("is not empty", "'mine'", "--resume")),
        (_out_is_a_file, ("cannot be written", "'mine'", "--out")),
        (_out_below_a_file, ("cannot be written", "'mine/run'", "--out")),
        (lambda _: "x" * 300, ("cannot be written", "--out")),
    ],
)
def test_bad_out(
    refused: Refused, tmp_path: Path, prepare: Callable[[Path], str], words: tuple[str, ...]
) -> None:
    refused("train", "--out", prepare(tmp_path), words=words)


def _options(data: Path, out: Path, **changes: object) -> dict[str, Any]:
    names = [str(flag).removeprefix("--").replace("-", "_") for flag in TINY[::2]]
    tiny = dict(zip(names, TINY[1::2], strict=True))
    return {**tiny, "data": str(data), "out": str(out), **changes}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run stopped half-way, one of another model, and their data."""
    root = tmp_path_factory.mktemp("trained")
    data = write_stripes(root / "data.npz")
    write_stripes(root / "other.npz", seed=1)
    run_training(_options(data, root / "run", epochs=4, stop_after=2))
    run_training(_options(data, root / "resnet", model="resnet20"))
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that was stopped half-way."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def _tear(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def _no_checkpoint(run: Path, trained: Path) -> None:
    del trained
    shutil.rmtree(run / "checkpoints")


def _torn_only(run: Path, trained: Path) -> None:
    del trained
    for checkpoint in (run / "checkpoints").iterdir():
        _tear(checkpoint)


def _other_model(run: Path, trained: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(trained / "resnet" / "checkpoints", run / "checkpoints")


def _other_data(run: Path, trained: Path) -> None:
    text = (run / "config.toml").read_text()
    config = text.replace(str(trained / "data.npz"), str(trained / "other.npz"))
    assert config != text
    (run / "config.toml").write_text(config)


def _data_gone(run: Path, trained: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace(str(trained / "data.npz"), "/gone.npz"))


def _other_version(run: Path, trained: Path) -> None:
    del trained
    for checkpoint in (run / "checkpoints").iterdir():
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / "manifest.json").write_text(
            json.dumps({**manifest, "format": "convoy-checkpoint-9"})
        )


def _config_broken(run: Path, trained: Path) -> None:
    del trained
    (run / "config.toml").write_text("epochs = = 1")


def _config_foreign(run: Path, trained: Path) -> None:
    del trained
    (run / "config.toml").write_text("[tool.black]\nline-length = 100")


def _checkpoints_a_file(run: Path, trained: Path) -> None:
    _no_checkpoint(run, trained)
    (run / "checkpoints").write_text("x")


def _as_it_is(run: Path, trained: Path) -> None:
    del run, trained


RESUME: list[Any] = [
    ("no checkpoint", _no_checkpoint, (), ("there is no checkpoint", "checkpoints")),
    ("checkpoints a file", _checkpoints_a_file, (), ("there is no checkpoint", "checkpoints")),
    ("torn only", _torn_only, (), ("no whole checkpoint", "model.safetensors", "damaged")),
    ("another model's", _other_model, (), ("another run", "'model'", "'resnet20'", "'lenet5'")),
    ("other data", _other_data, (), ("another run", "'data' differs")),
    ("data gone", _data_gone, (), ("unknown data set", "/gone.npz")),
    ("another version's", _other_version, (), ("convoy-checkpoint-9", "convoy-checkpoint-1")),
    ("config broken", _config_broken, (), ("config.toml", "not valid TOML")),
    ("config foreign", _config_foreign, (), ("config.toml", "unknown option 'tool'")),
    ("lr changed", _as_it_is, ("--lr", 0.5), ("cannot change 'lr'", "0.5", "Start a new run")),
    ("model changed", _as_it_is, ("--model", "vgg16"), ("cannot change 'model'", "'vgg16'")),
    ("seed changed", _as_it_is, ("--seed", 9), ("cannot change 'seed'", "9", "epochs")),
    ("with out", _as_it_is, ("--out", "else"), ("stays in its folder", "'else'")),
    ("finished", _as_it_is, ("--epochs", 2), ("finished", "2 epochs", "larger --epochs")),
    ("epochs too few", _as_it_is, ("--epochs", 1), ("finished", "2 epochs")),
    ("device unknown", _as_it_is, ("--device", "gpu"), ("unknown device", "'gpu'")),
]


@pytest.mark.parametrize(
    ("damage", "options", "words"), [case[1:] for case in RESUME], ids=[case[0] for case in RESUME]
)
def test_bad_resume(
    refused: Refused,
    run: Path,
    trained: Path,
    damage: Callable[[Path, Path], None],
    options: tuple[object, ...],
    words: tuple[str, ...],
) -> None:
    damage(run, trained)
    refused("train", "--resume", "run", *options, words=words)


@pytest.mark.usefixtures("run")
def test_resume_with_a_run_file(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 0.1")
    refused("train", "run.toml", "--resume", "run", words=("has its own config", "'run.toml'"))


def test_resume_of_an_empty_folder(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused("train", "--resume", "empty", words=("holds no run of Convoy", "'empty'"))


def test_resume_of_a_run_that_another_process_works_on(refused: Refused, run: Path) -> None:
    with (run / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        refused("train", "--resume", "run", words=("another process", "'run'"), code=3)


def test_resume_of_a_run_whose_pickle_is_not_executed(refused: Refused, run: Path) -> None:
    canary = run.parent / "canary"
    for checkpoint in (run / "checkpoints").iterdir():
        payload = f"cos\nsystem\n(S'touch {canary}'\ntR."
        (checkpoint / "model.safetensors").write_text(payload)
    refused("train", "--resume", "run", words=("no whole checkpoint",))
    assert not canary.exists()


@pytest.mark.usefixtures("run")
def test_out_that_holds_a_run(refused: Refused) -> None:
    refused("train", "--out", "run", words=("is not empty", "'run'", "--resume"))


def test_torn_newest_checkpoint_falls_back_to_the_previous_with_a_warning(
    convoy: Convoy, run: Path
) -> None:
    before = sorted((run / "checkpoints").iterdir())
    _tear(before[-1])
    outcome = convoy("train", "--resume", "run", "--stop-after", 0, "--json")
    assert outcome.code == 0
    assert f"warning: passed over a damaged checkpoint: {before[-1].relative_to(run.parent)}" in (
        outcome.err.replace("\n", "")
    )
    assert json.loads(outcome.out)["epochs"] == 4
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert load_checkpoint(newest).progress["epoch"] == 4
    assert "convoy: error" not in outcome.err
    with pytest.raises(CheckpointError):
        load_checkpoint(before[-1])


def _cut_images(folder: Path) -> None:
    content = (folder / "train-images.npy").read_bytes()
    (folder / "train-images.npy").write_bytes(content[:-1])


def _flip_labels(folder: Path) -> None:
    content = bytearray((folder / "train-labels.npy").read_bytes())
    content[-8] ^= 1
    (folder / "train-labels.npy").write_bytes(content)


def _lose_labels(folder: Path) -> None:
    (folder / "train-labels.npy").unlink()


def _lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def changed_manifest(**changes: object) -> Callable[[Path], None]:
    """Return a damage that gives a cache's manifest other values."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _cut_images,
        _flip_labels,
        _lose_labels,
        _lose_manifest,
        _break_manifest,
        pytest.param(changed_manifest(files=None), id="files of another type"),
        pytest.param(changed_manifest(statistics=[[0.0], [9.0]]), id="other statistics"),
        pytest.param(changed_manifest(classes=["a", "b", "c"]), id="other classes"),
        pytest.param(changed_manifest(format="older"), id="another format"),
    ],
)
def test_damaged_image_cache_is_rebuilt_in_silence(
    convoy: Convoy, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    write_stripes(tmp_path / "data.npz")
    command = ("train", *TINY, "--data", "data.npz", "--cache-dir", "cache", "--json", "--quiet")
    first = convoy(*command)
    (folder,) = (tmp_path / "cache").iterdir()
    whole = snapshot(folder)
    damage(folder)
    assert snapshot(folder) != whole
    second = convoy(*command)
    assert (second.code, second.err) == (0, "")
    assert snapshot(folder) == whole
    keys = ("test_accuracy", "train_loss")
    assert [json.loads(second.out)[key] for key in keys] == [
        json.loads(first.out)[key] for key in keys
    ]


def test_cache_that_cannot_be_written_costs_a_warning_only(
    convoy: Convoy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_stripes(tmp_path / "data.npz")
    (tmp_path / "file").write_text("x")
    outcome = convoy(
        "train", *TINY, "--data", "data.npz", "--cache-dir", "file", "--json", "--quiet"
    )
    assert outcome.code == 0
    assert "decoded images could not be cached" in caplog.text
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("name", [".ipynb_checkpoints/0.png", "cat/.hidden/0.png", "loose.png"])
def test_pictures_that_are_in_no_class_break_nothing(
    convoy: Convoy, tmp_path: Path, name: str
) -> None:
    pictures(tmp_path / "data", "cat", "dog")
    picture(tmp_path / "data" / name)
    outcome = convoy("train", *TINY, "--data", "data", "--quiet")
    assert outcome == Outcome(0, "", "")


@pytest.mark.parametrize("name", ["images", "labels"])
def test_arrays_of_another_byte_order_are_read_or_refused(
    convoy: Convoy, tmp_path: Path, name: str
) -> None:
    swapped = {"images": FLOATS.astype(">f4"), "labels": LABELS.astype(">i8")}
    save(tmp_path / "data.npz", **{name: swapped[name]})
    outcome = convoy("train", *TINY, "--data", "data.npz", "--quiet")
    assert outcome.code in (0, 2)
    assert outcome.err.count("convoy: error: ") == (1 if outcome.code else 0)


def test_picture_whose_name_is_no_utf8_is_learned_from(convoy: Convoy, tmp_path: Path) -> None:
    pictures(tmp_path / "data", "cat", "dog")
    picture(tmp_path / "data" / "cat" / "x.png")
    (tmp_path / "data" / "cat" / "x.png").rename(tmp_path / "data" / "cat" / "caf\udce9.png")
    outcome = convoy("train", *TINY, "--data", "data", "--json", "--quiet")
    assert outcome.code == 0


def test_data_whose_name_is_no_utf8_is_no_crash(convoy: Convoy, tmp_path: Path) -> None:
    write_stripes(tmp_path / "x.npz").rename(tmp_path / "caf\udce9.npz")
    outcome = convoy("train", *TINY, "--data", "caf\udce9.npz", "--quiet")
    assert outcome.code in (0, 2)
    assert not (outcome.code and outcome.out)


def test_bad_pictures_up_to_the_limit_are_left_out_and_named(
    convoy: Convoy, tmp_path: Path
) -> None:
    data = _folder_text_as_png(tmp_path)
    outcome = convoy("train", *TINY, "--data", data, "--max-bad-samples", 1, "--json")
    assert outcome.code == 0
    assert "warning: left out an image: cat/3.png" in outcome.err
