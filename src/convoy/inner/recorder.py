"""Record work once and launch it as a whole from then on.

What is recorded is a sequence of operations on tensors at fixed places. Python does not run again
when it is replayed, so new input must be copied to where the old one was.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from convoy.errors import ConvoyError

_REASON_LENGTH = 160


class RecordingError(ConvoyError):
    """Some work cannot be recorded; nothing of it was done."""


class Recording(Protocol):
    """Work that can be done again."""

    def replay(self) -> None:
        """Do it again, on what now lies where its input was."""
        ...


class Recorder(Protocol):
    """Makes recordings of one generation: all of them are dropped together."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Note what some work would do, without doing it."""
        ...


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._newest: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], None]) -> Recording:
        """Capture what some work launches."""
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream the current one: this context mends that.
        present = torch.cuda.stream(torch.cuda.current_stream(self._device))
        capture = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",  # what other threads do must not spoil it
        )
        with torch.cuda.device(self._device), present:
            try:
                with capture:
                    work()
            except Exception:
                self._clean_up()
                raise
        self._newest = graph  # a pool cannot be used again once all its graphs are gone
        return graph

    def _clean_up(self) -> None:
        """Put right what torch (up to 2.11) leaves behind when a capture fails.

        Its allocator believes that the capture goes on, and would not free memory any more. So
        does its generator of random numbers, until a capture succeeds.
        """
        with suppress(RuntimeError):  # a later torch has done it already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        stream = torch.cuda.Stream(self._device)
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            torch.zeros(1, device=self._device)


class Replay:
    """A piece of work: done directly the first time, recorded the second, then replayed.

    The first time sets up what libraries set up when they are first used, which cannot be
    recorded; and most sizes of a short last batch are seen only once.
    """

    def __init__(self) -> None:
        self._is_warm = False
        self._recording: Recording | None = None

    def run(self, work: Callable[[], None], recorder: Recorder) -> None:
        """Do the work, which must be the same at each call.

        Raises:
            RecordingError: it cannot be recorded, and has not been done this time.
        """
        if not self._is_warm:
            work()
            self._is_warm = True
            return
        if self._recording is None:
            try:
                self._recording = recorder.record(work)
            except Exception as error:  # a network may do anything that cannot be recorded
                raise RecordingError(_words_for(error)) from error
        self._recording.replay()


def _words_for(error: BaseException) -> str:
    """Say in short why a recording failed: what went wrong first, not what followed from it."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")[:_REASON_LENGTH]
