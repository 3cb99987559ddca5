"""A node from elsewhere: joins a lead, and comes back when the lead does."""

import signal
import time
from collections.abc import Callable

from convoy.errors import EnvironmentProblem
from convoy.launch.link import LeadLostError, RefusedError
from convoy.launch.node import Order, run_node

_AGAIN_S = 1.0


def join(order: Order, *, reconnect_s: float, tell: Callable[[str], None]) -> str:
    """Take part in a run until it is over; return why it is.

    A lead that cannot be reached, or is lost, is tried again for so many seconds: it may be
    resumed. Whatever it resumes from, this node is given the state anew.
    """
    deadline = time.monotonic() + reconnect_s
    told = ""
    while True:
        joined_at = time.monotonic()
        try:
            return run_node(order)
        except RefusedError:
            raise
        except LeadLostError as error:
            if "ended the run" in str(error):
                return "the lead has ended the run"
            if time.monotonic() - joined_at > _AGAIN_S * 5:  # it had been there
                deadline = time.monotonic() + reconnect_s
            if time.monotonic() >= deadline:
                raise EnvironmentProblem(f"gave up after {reconnect_s:g} s: {error}") from None
            if str(error) != told:
                told = str(error)
                tell(f"{error}; trying again for {reconnect_s:g} s")
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)  # nobody is left to take leave of
            time.sleep(_AGAIN_S)
