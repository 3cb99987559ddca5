"""The lead of a pipeline of processes: nodes agree among themselves where the network is cut."""

from contextlib import ExitStack
from typing import Any

from convoy.launch import wire_pb2 as wire
from convoy.launch.lockstep_lead import LockstepLead
from convoy.launch.roster import NodeRecord, Roster, summarise_nodes
from convoy.pipeline.layout import most_stages


class PipelineLead(LockstepLead):
    """Leads one pipeline; groups form, tell and save as they do in lockstep."""

    def _begin(self, stack: ExitStack) -> None:
        super()._begin(stack)
        self._job.describe_nodes = lambda: summarise_stages(self._roster)

    def _let_in(self, node: NodeRecord) -> None:
        """Call a node that comes late into the group, if there is a stage for it."""
        if len(self._roster.in_state("training")) < most_stages(self._job.model):
            self._call_together()
            return
        assert node.connection is not None
        node.connection.tell(aside=wire.Nothing())
        reason = "there is a node for every stage already"
        self._note_aside(node, wire.Aside(reason=reason, speed=node.speed))

    def _watch(self) -> None:
        """Call a node that stood aside where another is missing."""
        spares = self._roster.in_state("aside")
        if spares and len(self._roster.in_state("training")) < most_stages(self._job.model):
            for node in spares:
                node.state = "ready"
            self._call_together()


def summarise_stages(roster: Roster) -> dict[str, Any]:
    """Return what the run's summary says of its nodes: a share is a part of the weight layers."""
    layers = [record.share for record in roster.latest()]
    total = sum(layers) or 1
    return {
        **summarise_nodes(roster),
        "shares": [round(count / total, 4) for count in layers],
        "stages": layers,
        "equal_shares_slowdown": None,
    }
