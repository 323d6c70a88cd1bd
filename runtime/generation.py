"""One submitted request, seen by its caller: wait for it, iterate over it, abort it; from a thread or an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator

import numpy as np
from numpy.typing import NDArray

from twostroke.runtime.counters import Acceptance
from twostroke.runtime.outputs import CompletionOutput, FinishReason, RequestOutput
from twostroke.runtime.sampling_params import SamplingParams


class Generation:
    """A request under way; what `LLM.generate_async` returns, with the methods TensorRT-LLM's result has.

    Iterating, with `for` or `async for`, yields outputs that each hold the whole answer so far: one for every time
    something new was there if `streaming`, else the finished one. A slow reader misses no token, only steps between.
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        streaming: bool,
        abort: Callable[[int], None],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.streaming = streaming
        self._abort = abort
        self._aborted = False
        self._changed = threading.Condition()
        self._readers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._text = ""
        self._token_ids: list[int] = []
        self._logits: list[NDArray[np.float32]] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._acceptance: Acceptance | None = None
        self._error: BaseException | None = None
        self._version = 0

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, cancelled or failed."""
        return self._finish_reason is not None or self._error is not None

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def abort(self) -> None:
        """Ends the request; it finishes as `cancelled` with what it has. Nothing happens if it has finished."""
        self._aborted = True
        self._abort(self.request_id)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the end and returns the output, or raises what the request failed with. After `timeout` seconds
        TimeoutError; the request goes on."""
        with self._changed:
            if not self.wait(timeout):
                raise TimeoutError(f"request {self.request_id} is not finished after {timeout} seconds")
            return self._output(0, 0)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, whether well or not; False if it has not come after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finished, timeout)

    async def aresult(self) -> RequestOutput:
        """`result` for an event loop."""
        return [output async for output in self._aiterate(every=False)][-1]

    def __await__(self) -> Generator[None, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        seen = text = tokens = 0
        ended = False
        while not ended:
            with self._changed:
                while not self._news(seen, self.streaming):
                    self._changed.wait()
                output = self._output(text, tokens)
                seen, ended = self._version, self.finished
            text, tokens = len(output.outputs[0].text), output.outputs[0].length
            yield output

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._aiterate(every=self.streaming)

    async def _aiterate(self, every: bool) -> AsyncIterator[RequestOutput]:
        seen = text = tokens = 0
        ended = False
        reader = (asyncio.get_running_loop(), asyncio.Event())
        with self._changed:
            self._readers.add(reader)
        try:
            while not ended:
                reader[1].clear()
                with self._changed:
                    output = self._output(text, tokens) if self._news(seen, every) else None
                    seen, ended = (self._version, self.finished) if output else (seen, False)
                if output is None:
                    await reader[1].wait()
                    continue
                text, tokens = len(output.outputs[0].text), output.outputs[0].length
                yield output
        finally:
            with self._changed:
                self._readers.discard(reader)

    def _news(self, seen: int, every: bool) -> bool:
        return self.finished or (every and self._version > seen)

    def _output(self, text: int, tokens: int) -> RequestOutput:
        if self._error is not None:
            raise self._error
        answer = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=self._token_ids.copy(),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            generation_logits=np.stack(self._logits) if self._logits and self.finished else None,
            text_diff=self._text[text:],
            token_ids_diff=self._token_ids[tokens:],
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[answer],
            finished=self.finished,
            seed=self.params.seed,
            acceptance=self._acceptance,
        )

    def publish(
        self,
        text: str = "",
        token_ids: list[int] | None = None,
        logits: list[NDArray[np.float32]] | None = None,
        acceptance: Acceptance | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Adds to the answer; called by the serving thread. After the end nothing is added any more."""
        with self._changed:
            if self.finished:
                return
            self._text += text
            self._token_ids += token_ids or []
            self._logits += logits or []
            self._acceptance = acceptance or self._acceptance
            self._finish_reason, self._stop_reason = finish_reason, stop_reason
            self._announce()

    def fail(self, error: BaseException) -> None:
        """Ends the request with an error, which every waiting reader gets."""
        with self._changed:
            if not self.finished:
                self._error = error
                self._announce()

    def _announce(self) -> None:
        self._version += 1
        self._changed.notify_all()
        for loop, event in self._readers:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(event.set)
