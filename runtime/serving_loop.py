"""The one thread that runs the scheduler, and the way in and out of it.

Everything the scheduler touches is touched by this thread only. A request that cannot be delivered ends alone; an error
of a step ends all that run, because nobody knows whose state it left behind.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.engines.errors import EngineError
from twostroke.runtime.detokenizer import AnswerText
from twostroke.runtime.generation import Generation
from twostroke.runtime.outputs import FinishReason
from twostroke.runtime.request import Progress, Request
from twostroke.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(frozen=True)
class _Running:
    generation: Generation
    text: AnswerText | None


class ServingLoop:
    """Serves generations until `close`. Methods may be called from any thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._running: dict[str, _Running] = {}
        self._inbox: deque[_Running | str] = deque()  # a request to start, or the id of one to cancel
        self._changed = threading.Condition()
        self._closed: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="twostroke-serving", daemon=True)
        self._thread.start()

    def submit(self, work: Sequence[tuple[Generation, AnswerText | None]]) -> None:
        """Queues requests, all of them before the next step. EngineError once the loop has ended."""
        with self._changed:
            if self._closed is not None:
                raise self._closed
            self._inbox.extend(_Running(generation, text) for generation, text in work)
            self._changed.notify()

    def abort(self, request_id: int) -> None:
        """Ends a request before the next step; unknown and finished ones are ignored."""
        with self._changed:
            self._inbox.append(str(request_id))
            self._changed.notify()

    def close(self) -> None:
        """Ends the loop after the step under way; what still runs finishes as `cancelled`."""
        with self._changed:
            self._closed = self._closed or EngineError("this LLM is shut down; make a new one")
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            logger.debug("serving has stopped", exc_info=True)
            self._give_up(error)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._closed or self._scheduler.has_work)
                ending = self._closed is not None
            while self._inbox:
                received = self._inbox.popleft()
                if isinstance(received, str):
                    self._cancel(received)
                else:
                    self._start(received)
            if ending:
                break
            if self._scheduler.has_work:
                for progress in self._scheduler.step():
                    self._deliver(progress)
        for request_id in tuple(self._running):
            self._cancel(request_id)

    def _start(self, entry: _Running) -> None:
        generation = entry.generation
        request_id = str(generation.request_id)
        try:
            self._scheduler.submit(Request(request_id, generation.prompt_token_ids, generation.params))
        except Exception as error:
            generation.fail(error)
        else:
            self._running[request_id] = entry

    def _cancel(self, request_id: str) -> None:
        entry = self._running.pop(request_id, None)
        if entry is None:
            logger.debug("request %s is not running; nothing to cancel", request_id)
            return
        entry.generation.publish(text=entry.text.flush() if entry.text else "", finish_reason="cancelled")
        self._scheduler.abort(request_id)

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            self._closed = EngineError(f"serving has stopped, because a step failed ({type(error).__name__}: {error})")
            self._closed.__cause__ = error
            waiting = [each for each in self._inbox if isinstance(each, _Running)]
            self._inbox.clear()
        for entry in (*self._running.values(), *waiting):
            entry.generation.fail(self._closed)
        self._running.clear()

    def _deliver(self, progress: Progress) -> None:
        entry = self._running.get(progress.request_id)
        if entry is None:
            logger.debug("progress for request %s, which is gone, is dropped", progress.request_id)
            return
        try:
            self._publish(entry, progress)
        except Exception as error:
            logger.debug("request %s could not be delivered", progress.request_id, exc_info=True)
            entry.generation.fail(error)
        if entry.generation.finished:
            del self._running[progress.request_id]
            if progress.finish_reason is None:
                self._scheduler.abort(progress.request_id)

    def _publish(self, entry: _Running, progress: Progress) -> None:
        token_ids = progress.token_ids
        finish: FinishReason | None = None
        if progress.finish_reason is not None:
            finish = _FINISH[progress.finish_reason]
        stop_reason: int | str | None = progress.stop_reason
        acceptance = progress.acceptance
        text = ""
        if entry.text is not None:
            piece = entry.text.push(token_ids, ends_with_stop_token=finish == "stop")
            text, token_ids = piece.text, token_ids[: piece.kept]
            if piece.stop is not None:
                finish, stop_reason = "stop", piece.stop
                acceptance.cut(len(progress.token_ids), piece.kept)
                self._scheduler.stop(progress.request_id, acceptance)
            elif finish is not None:
                text += entry.text.flush()
        entry.generation.publish(
            text=text,
            token_ids=token_ids,
            logits=[] if progress.logits is None else list(progress.logits[: len(token_ids)]),
            acceptance=acceptance,
            finish_reason=finish,
            stop_reason=stop_reason,
        )
