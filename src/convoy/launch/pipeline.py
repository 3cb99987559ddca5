"""The strategy `pipeline`: of processes, or virtually, on one device."""

from contextlib import ExitStack

from convoy.config import stages_asked
from convoy.outer.crew import Crew
from convoy.outer.job import Job
from convoy.pipeline.costs import measure_blocks
from convoy.pipeline.layout import choose_bounds, lay_out
from convoy.pipeline.partition import Worker
from convoy.pipeline.virtual import VirtualPipeline

_STAGES = 2  # of a virtual pipeline, unless another number is asked for


def lead_pipeline(job: Job, crew: Crew) -> str:
    """Lead a pipeline to its end; return in words why it ended."""
    if job.config.virtual:
        return _train_virtually(job)
    # What processes need to find each other; it takes long to import.
    from convoy.launch.pipeline_lead import PipelineLead

    with ExitStack() as stack:
        return PipelineLead(job, crew, stack).run()


def _train_virtually(job: Job) -> str:
    """Train as a pipeline would, here and alone."""
    config, shape = job.config, job.data.train.shape_CHW
    costs = measure_blocks(job.model, shape, config.batch, job.executor.arithmetic)
    workers = [Worker(costs.seconds)] * (stages_asked(config) or _STAGES)
    layout = lay_out(job.model, choose_bounds(config, costs, workers))
    return VirtualPipeline(job, layout).train()
