"""One node of a run, as its events show it."""

from dataclasses import dataclass
from typing import Any

from convoy.monitor.events import JoinEvent


@dataclass
class NodeView:
    """What is known of a node; see docs/monitor.md for the names."""

    node: int
    name: str
    device: str = ""
    pid: int = 0
    state: str = "ready"
    reason: str = ""
    speed: float = 0.0
    share: float = 0.0
    predicted_share: float = 0.0
    samples: int = 0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    staleness: int | None = None
    last_seen: float = 0.0
    joined: float = 0.0
    faults: int = 0

    @property
    def is_here(self) -> bool:
        """Tell whether it takes part, or is about to."""
        return self.state in ("ready", "training")

    def join(self, event: JoinEvent, when: float) -> None:
        """Take in that it is there, maybe again."""
        self.name, self.device, self.pid = event.name, event.device, event.pid
        self.state, self.reason = "ready", event.reason
        self.joined, self.last_seen = when, when

    def train(self, when: float) -> None:
        """Take in that it trains; what it is called aside for is forgotten."""
        if self.state != "training":
            self.state, self.reason = "training", ""
        self.last_seen = when

    def leave(self, state: str, reason: str) -> None:
        """Take in that it is lost, left or stands aside: it has no share any more."""
        self.state, self.reason = state, reason
        self.faults += state == "lost"
        self.share = self.predicted_share = 0.0
        self.speed = self.speed if state == "aside" else 0.0

    def section(self) -> dict[str, Any]:
        """Return what the page shows of it."""
        total = self.busy_s + self.waiting_s
        return {
            **vars(self),
            "busy_s": round(self.busy_s, 3),
            "waiting_s": round(self.waiting_s, 3),
            "waiting": round(self.waiting_s / total, 4) if total else 0.0,
        }
