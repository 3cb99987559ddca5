"""The process of a node: joins a lead, trains its share, leaves when all is done."""

import copy
import ctypes
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from convoy.assembly import Given, make_job
from convoy.config import Config
from convoy.data.images import TrainTest
from convoy.errors import ConvoyError
from convoy.files import digest_of_text
from convoy.hybrid.runner import Hybrid
from convoy.inner.probe import measure
from convoy.launch import wire_pb2 as wire
from convoy.launch.link import LeadLostError, Link, RefusedError
from convoy.launch.links import enter_namespace
from convoy.launch.parameters.exchange import Service
from convoy.launch.server_node import Supply, choose_coding, open_supply, take_part
from convoy.monitor.events import EventStream
from convoy.outer.groupwork import GroupWork, Left, StandAside
from convoy.outer.job import Job
from convoy.outer.lockstep import Lockstep
from convoy.outer.membership import Group
from convoy.outer.server import FencedError, ShutOutError
from convoy.outer.state import unpack
from convoy.pipeline.runner import Pipeline
from convoy.tracking import untracked

_PROBE_S = 0.4
_PROBE_AT_MOST = 256  # samples
_NODES_UNKNOWN = 4  # how many may come where that is not known
_PROBE_FIRST_S, _PROBE_AGAIN_S = 5.0, 60.0  # between measurements of a node that stands aside
_EXCHANGE_AT_MOST_S = 600.0  # a last resort: the lead breaks a group up long before
_NEWS_S = 0.5  # until a link knows that the lead is gone
_WORK: dict[str, type[GroupWork]] = {"hybrid": Hybrid, "pipeline": Pipeline}
_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True, eq=False)
class Order:
    """What a node must know before it can ask its lead for the rest.

    Attributes:
        lead: "host:port".
        token: what the lead wants to hear.
        certificate: the one that the lead shows (PEM); None where it does not use TLS.
        name: for people.
        slot: which of the lead's own nodes this is; -1 for one from elsewhere.
        device, threads: what to compute with.
        given: a model and data handed over as objects.
        namespace: the network namespace to live in, in the lab.
        data_dir, cache_dir: where this machine keeps them, if not where the lead does.
        stream_data: have samples sent by the lead instead of reading the data set.
    """

    lead: str
    token: str = field(repr=False)
    name: str
    slot: int = -1
    device: str = "auto"
    threads: int = 0
    model: nn.Module | None = None
    data: TrainTest | None = None
    namespace: str | None = None
    data_dir: str | None = None
    cache_dir: str | None = None
    certificate: bytes | None = None
    stream_data: bool = False


def run_local_node(order: Order) -> None:
    """Be one of the lead's own nodes: ends with the lead, and leaves signals to it."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the lead decides
    threading.Thread(target=_end_with_lead, name="lead", daemon=True).start()
    if order.namespace is not None:
        enter_namespace(order.namespace)
    try:
        run_node(order)
    except LeadLostError:
        os._exit(0)  # the run is over, or its lead is dead: there is nobody to tell
    except ConvoyError as error:
        os._exit(error.exit_code)
    # Threads of gRPC, torchft and gloo may be waiting for peers that are gone.
    os._exit(0)


def _end_with_lead() -> None:
    # The process that forked us lives as long as we do; only this tells that the lead is dead.
    lead = multiprocessing.parent_process()
    if lead is not None:
        lead.join()
        os._exit(0)


def run_node(order: Order) -> str:
    """Take part in a run until it is over; return why it is.

    Raises:
        RefusedError: the lead will not have us.
        LeadLostError: the lead is gone.
    """
    while True:
        try:
            return _run_once(order)
        except FencedError:  # it was believed to be gone, and its work was given to others
            time.sleep(_NEWS_S)


def _run_once(order: Order) -> str:
    link = Link(order.lead, order.token, order.certificate)
    try:
        welcome = link.join(order.name, order.slot)
        signal_leave(link)
        if welcome.service:
            return _serve(order, welcome, link)
        job = _prepare(order, welcome, link, None)
        return _take_part(job, welcome, link)
    except (LeadLostError, RefusedError, FencedError):
        raise
    except Left as left:
        link.leave(str(left))
        return str(left)
    except ShutOutError as error:
        link.fail(str(error), error.exit_code, fatal=False)
        raise
    except ConvoyError as error:
        link.fail(str(error), error.exit_code, fatal=True)
        raise
    except Exception as error:
        time.sleep(_NEWS_S)
        link.check()  # whatever failed, failed because the lead is gone
        link.fail(_describe(error), 1, fatal=False)
        raise ConvoyError(f"this node failed: {_describe(error)}") from error
    finally:
        link.close()


def signal_leave(link: Link) -> None:
    """Leave after the current step when asked to terminate; at once when asked again."""

    def note(number: int, frame: object) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        link.leaving = True

    signal.signal(signal.SIGTERM, note)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)


def _prepare(order: Order, welcome: wire.Welcome, link: Link, supply: Supply | None) -> Job:
    config = Config(**json.loads(welcome.config))
    chosen: dict[str, object] = {"device": order.device, "threads": order.threads}
    if order.slot < 0:  # another machine: its folders are its own
        chosen |= {"data_dir": order.data_dir, "cache_dir": order.cache_dir}
    events = EventStream([link])
    job = make_job(
        config.replaced(chosen),
        # Torch hands a module over as shared memory: all nodes would train the same weights.
        Given(copy.deepcopy(order.model), supply.data if supply is not None else order.data),
        Path(os.devnull),
        events,
        link,
        untracked,
    )
    if welcome.has_state:
        job.take_over(unpack(link.fetch_state()), "the lead's state")
    link.prepared(
        job.data.digest, model_digest(job.model), device_name(job), torch.get_num_threads()
    )
    return job


def _serve(order: Order, welcome: wire.Welcome, link: Link) -> str:
    """Take part in a run with a parameter service."""
    config = Config(**json.loads(welcome.config))
    supply = None
    if config.stream_data or order.stream_data:
        at_home = config if order.slot >= 0 else config.replaced({"cache_dir": order.cache_dir})
        supply = open_supply(at_home, welcome, order.lead, order.token, order.certificate)
    job = _prepare(order, welcome, link, supply)
    service = Service(
        welcome.service,
        order.token,
        welcome.run,
        order.certificate,
        patience_s=config.quorum_timeout_s,
    )
    coding = choose_coding(config, same_host=order.slot >= 0 and order.namespace is None)
    link.ready(probe(job))
    reason = take_part(job, welcome, link, service, coding, supply)
    link.done(reason)
    return reason


def _take_part(job: Job, welcome: wire.Welcome, link: Link) -> str:
    """Train, stand aside, come back, until the run is over."""
    group = _make_group(job, welcome)
    link.group = group
    speed = probe(job)
    make = _WORK.get(job.config.strategy, Lockstep)
    work: GroupWork = make(job, group, link, speed)
    group.show_up()
    link.ready(speed)
    while True:
        try:
            reason = work.train()
            link.done(reason)
            return reason
        except StandAside as aside:
            speed = _wait_aside(job, link, str(aside), speed)
            work = make(job, group, link, speed)
        finally:
            group.leave()


def _make_group(job: Job, welcome: wire.Welcome) -> Group:
    return Group(
        identity=welcome.identity,
        number=welcome.number,
        device=device_name(job),
        layout=job.executor.arithmetic.layout,
        address=welcome.address,
        lighthouse=welcome.lighthouse,
        store=welcome.store,
        timeout_s=_EXCHANGE_AT_MOST_S,
    )


def _wait_aside(job: Job, link: Link, reason: str, speed: float) -> float:
    """Wait to be called; measure anew now and then, for speeds change."""
    link.set_scribe(False)
    link.stand_aside(reason, speed)
    pause_s = _PROBE_FIRST_S
    while not link.wait_for_call(pause_s):
        if link.leaving:
            raise Left("asked to leave")
        pause_s = min(2 * pause_s, _PROBE_AGAIN_S)
        speed = probe(job)
        link.stand_aside(reason, speed)
    return speed


def probe(job: Job) -> float:
    """Measure how many samples per second this node trains of an equal share of a batch."""
    config = job.config
    nodes = config.nodes if config.nodes > 1 else _NODES_UNKNOWN
    size = max(config.min_share, min(config.batch // nodes, _PROBE_AT_MOST))
    smallest = _measure(job, config.min_share, budget_s=0.0)
    if size / smallest > _PROBE_S:
        return smallest  # a slow node need not be measured well to be known as slow
    return _measure(job, size, _PROBE_S)


def _measure(job: Job, size: int, budget_s: float) -> float:
    shape = job.data.train.shape_CHW
    return measure(job.config, job.executor.arithmetic, job.model, shape, size, budget_s)


def model_digest(model: nn.Module) -> str:
    """Return a digest of a network's structure: its tensors' names, shapes and order."""
    lines = [f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()]
    return digest_of_text("\n".join(lines))


def device_name(job: Job) -> str:
    """Return what a node computes on; a GPU's own name tells it from any other."""
    device = job.executor.arithmetic.device
    if device.type != "cuda":
        return device.type
    return f"{device} {torch.cuda.get_device_properties(device).uuid}"


def _describe(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
