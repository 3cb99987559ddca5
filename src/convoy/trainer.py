"""The front door: a config goes in, a trained network and its run come out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy.assembly import IN_MEMORY, Given, check_choices, make_job
from convoy.config import Config, changed_on_resume
from convoy.data.images import TrainTest
from convoy.data.load import wrap_data
from convoy.data.sources.user import as_image_set
from convoy.errors import CheckpointError, ConfigError, ConvoyError, Interrupted
from convoy.launch.choose import check_crew, choose_crew, config_of_nodes
from convoy.models.blocks import count_parameters
from convoy.monitor.events import EndEvent, EventStream, Sink, StartEvent, WarningEvent
from convoy.monitor.journal import Journal
from convoy.monitor.terminal import TerminalView, make_console, make_track
from convoy.outer.crew import Crew, Serving
from convoy.outer.job import Job
from convoy.outer.stop import StopRequest
from convoy.outer.strategy import STRATEGIES
from convoy.run import Run, summarise
from convoy.storage.checkpoint import Found, load_newest
from convoy.storage.runfolder import RunFolder, new_run_folder
from convoy.tracking import Track, untracked

Around = Callable[[Path], AbstractContextManager[Sequence[Sink]]]


def _alone(folder: Path) -> AbstractContextManager[Sequence[Sink]]:
    """Have nothing go on beside a run."""
    del folder
    return nullcontext(())


def fit(
    model: nn.Module | str,
    train: object,
    test: object = None,
    *,
    resume: str | Path | None = None,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Train a network and return the run.

    Args:
        model: a module, which is trained in place, or a name such as "resnet20".
        train: training data: a name or path; (images, labels); an ImageSet; or any data set
            with a length and items (image, label).
        test: test data of the same kinds; leave it out where `train` is a name or path.
        resume: the folder of a run to go on with.
        quiet: show nothing.
        **options: any field of `Config`: epochs=5, batch=256, lr=0.1 ...

    Raises:
        ConvoyError: what is wrong, in words.

    Example:
        >>> import convoy
        >>> run = convoy.fit("lenet5", "fashion-mini", epochs=1, quiet=True)  # doctest: +SKIP
        >>> run.accuracy > 0.7  # doctest: +SKIP
        True
    """
    console = make_console(quiet=quiet)
    track = make_track(console)
    if isinstance(train, str) and test is not None:
        raise ConfigError("'test' has no place beside a data set given by name", got=test)
    given = Given(
        model=None if isinstance(model, str) else model,
        data=None if isinstance(train, str) else _wrap(train, test, track),
    )
    names = {
        "model": model if isinstance(model, str) else f"{IN_MEMORY} {type(model).__name__}",
        "data": train if isinstance(train, str) else IN_MEMORY,
    }
    return run_training(
        {**options, **names},
        resume=Path(resume) if resume is not None else None,
        given=given,
        sinks=[TerminalView(console)],
        track=track,
    )


def train(config: Config, *, sinks: Sequence[Sink] = (), track: Track = untracked) -> Run:
    """Train what a config describes, in a new run folder.

    Args:
        config: everything that decides the run.
        sinks: receive the run's events, beside its own `events.jsonl`.
        track: shows progress while data is read.
    """
    return run_training(config.as_dict(), sinks=sinks, track=track)


def run_training(
    options: dict[str, Any],
    *,
    resume: Path | None = None,
    given: Given | None = None,
    sinks: Sequence[Sink] = (),
    track: Track = untracked,
    serving: Serving | None = None,
    around: Around = _alone,
) -> Run:
    """Train in a new run folder, or go on in one from its newest whole checkpoint.

    Args:
        options: fields of `Config`; on a resume, those that differ from the saved ones.
        resume: the folder of the run to go on with.
        given: model and data handed over as objects.
        sinks: receive the run's events, beside its own `events.jsonl`.
        track: shows progress while data is read.
        serving: lets nodes of other machines join.
        around: is opened with the run's folder while it lasts, and gives further sinks.
    """
    given = given or Given()
    if resume is None:
        config = Config(**options)
        check_choices(config, given)
        check_crew(config, serving=serving is not None)
        with new_run_folder(config) as folder, around(folder.path) as more:
            return _run(config, folder, given, [*sinks, *more], track, None, serving)
    if options.get("out") is not None:
        raise ConfigError("a resumed run stays in its folder", got=options["out"])
    with RunFolder(resume) as folder:
        config = changed_on_resume(folder.open(), options)
        check_choices(config, given)
        check_crew(config, serving=serving is not None)
        found = load_newest(folder.checkpoints)
        with around(folder.path) as more:
            return _run(config, folder, given, [*sinks, *more], track, found, serving)


def _wrap(train: object, test: object, track: Track) -> TrainTest:
    if test is None:
        raise ConfigError("training data handed over in Python needs test data beside it")
    return wrap_data(as_image_set(train, "training", track), as_image_set(test, "test", track))


def _run(
    config: Config,
    folder: RunFolder,
    given: Given,
    sinks: Sequence[Sink],
    track: Track,
    found: Found | None,
    serving: Serving | None,
) -> Run:
    events = EventStream([Journal(folder.events), *sinks])
    try:
        with StopRequest() as stop:
            job = make_job(config_of_nodes(config), given, folder.checkpoints, events, stop, track)
            if found is not None:
                _restore(job, found)
            crew = choose_crew(job, given, config, folder.ledger, serving)
            folder.write_config(job.config.replaced({"threads": config.threads}))
            _announce(job, crew, found)
            return _train(job, crew, folder)
    finally:
        events.close()


def _restore(job: Job, found: Found) -> None:
    for problem in found.damaged:
        job.events.emit(WarningEvent(reason=f"passed over a damaged checkpoint: {problem}"))
    job.restore(found.checkpoint, found.path)
    if job.progress.epoch >= job.config.epochs:
        raise CheckpointError(
            "this run is finished",
            got=f"{job.progress.epoch} epochs",
            hint="Give a larger --epochs to go on.",
        )


def _announce(job: Job, crew: Crew, found: Found | None) -> None:
    config = job.config
    for problem in job.data.skipped:
        job.events.emit(WarningEvent(reason=f"left out an image: {problem}"))
    job.events.emit(
        StartEvent(
            model=config.model,
            parameters=count_parameters(job.model),
            data=config.data,
            train_samples=len(job.data.train),
            test_samples=len(job.data.test),
            epochs=config.epochs,
            batch=config.batch,
            strategy=config.strategy,
            executor=config.executor,
            device=config.device,
            precision=config.precision,
            memory_format=config.memory_format,
            threads=crew.threads if len(crew.devices) > 1 else torch.get_num_threads(),
            nodes=len(crew.devices),
            from_step=job.progress.updates,
            reason="a new run" if found is None else f"goes on from {found.path.name}",
        )
    )


def _train(job: Job, crew: Crew, folder: RunFolder) -> Run:
    try:
        reason = STRATEGIES.get(job.config.strategy)(job, crew)
        job.require_saved()
    except ConvoyError as error:
        state = "interrupted" if isinstance(error, Interrupted) else "failed"
        job.events.emit(EndEvent(state=state, reason=str(error)))
        folder.write_summary(summarise(job, folder, state, str(error)))
        raise
    state = "finished" if job.progress.epoch >= job.config.epochs else "stopped"
    job.events.emit(EndEvent(state=state, reason=reason))
    summary = summarise(job, folder, state, reason)
    folder.write_summary(summary)
    return Run(
        config=job.config,
        state=state,
        reason=reason,
        model=job.model,
        directory=folder.path,
        checkpoint=job.last_saved,
        history=job.progress.history,
        shares=summary["shares"],
        summary=summary,
    )
