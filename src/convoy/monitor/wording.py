"""Events in words, for the log of the page and of reports."""

from convoy.monitor.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    Event,
    GroupEvent,
    JoinEvent,
    LeaveEvent,
    NoteEvent,
    PausedEvent,
    RefusedEvent,
    SharesEvent,
    StartEvent,
    WarningEvent,
)

_SHARED = {"samples": "a batch", "layers": "the weight layers"}


def sentence(event: Event) -> str | None:
    """Return what a log says of an event; None: it is one of many, which curves show."""
    match event:
        case StartEvent():
            return f"{event.model} on {event.data}, {event.strategy}: {event.reason}"
        case EvaluationEvent():
            return f"epoch {event.epoch} is over: test accuracy {event.test_accuracy:.2%}"
        case CheckpointEvent():
            return f"checkpoint at step {event.step}: {event.reason}"
        case JoinEvent():
            return f"{event.name} on {event.device} is there: {event.reason}"
        case GroupEvent():
            names = ", ".join(str(number + 1) for number in event.nodes)
            return f"nodes {names} train from step {event.step}: {event.reason}"
        case SharesEvent():
            shares = ", ".join(str(share) for share in event.shares)
            what = _SHARED.get(event.of, event.of)
            return f"shares of {what} are now {shares}: {event.reason}"
        case NoteEvent():
            return event.text
        case EndEvent():
            return f"{event.state}: {event.reason}"
        case LeaveEvent() | WarningEvent() | RefusedEvent() | PausedEvent():
            return event.reason
        case _:
            return None


def level(event: Event) -> str:
    """Return how bad an event is: info, warning or fault."""
    match event:
        case LeaveEvent(fault=True) | EndEvent(state="failed"):
            return "fault"
        case WarningEvent() | RefusedEvent() | PausedEvent():
            return "warning"
        case _:
            return "info"
