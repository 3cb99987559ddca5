"""Bad options, variables and run files: one clear line, exit code 2, nothing left behind."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Refused


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
