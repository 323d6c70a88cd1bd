"""The Python front: `LLM(model=ENGINE_DIR).generate(prompts, SamplingParams(...))`.

Everything a caller may have got wrong is said here, before anything is queued.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from twostroke.engines.errors import RequestError
from twostroke.engines.loading import load_engine_directory
from twostroke.runtime.detokenizer import AnswerText
from twostroke.runtime.generation import Generation
from twostroke.runtime.outputs import RequestOutput
from twostroke.runtime.request import check_prompt, check_stops, draft_depth
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.runtime.serving_loop import ServingLoop
from twostroke.runtime.tokenizer import TOKENIZER_FILE, Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """An engine directory, loaded and serving. Close it with `shutdown()` or by using it in a `with` statement.

    `model` is the directory; `options` are the fields of `RuntimeConfig` (max_batch_size, draft_length, threads, ...).
    `tokenizer` names another folder with a tokenizer. Without any tokenizer, or with `skip_tokenizer_init`, prompts are
    token ids and outputs have no text. `progress(what, done, total)` is told how loading and warm-up go.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: str | Path | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        **options: Any,
    ) -> None:
        config = RuntimeConfig(**options)
        loaded = load_engine_directory(
            Path(model), config.threads, lambda done, total: progress("loading", done, total)
        )
        self.model = Path(model)
        self.manifest = loaded.manifest
        self.limits = config.limits(loaded.manifest)
        self.tokenizer = None if skip_tokenizer_init else _tokenizer(self.model, tokenizer)
        self._scheduler = Scheduler(loaded, config)
        self._scheduler.warm_up(lambda done, total: progress("warming up", done, total))
        self._loop = ServingLoop(self._scheduler)
        self._request_ids = itertools.count(1)
        self._finalizer = weakref.finalize(self, self._loop.close)

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """The finished output of one prompt, or the outputs of a list of prompts in its order.

        A prompt is text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`. If any prompt or
        parameter is refused, nothing runs. `use_tqdm` shows progress on a terminal.
        """
        single = _is_prompt(inputs)
        prompts: Sequence[Any] = [inputs] if single else inputs  # type: ignore[assignment]
        if len(prompts) == 0:
            raise RequestError("inputs is empty, expected a prompt or a list of prompts", field="inputs")
        params = _one_for_each(prompts, sampling_params)
        generations = []
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            try:
                generations.append(self._prepare(prompt, each, streaming=False))
            except RequestError as error:
                if single:
                    raise
                raise RequestError(f"prompt {index}: {error}", field=error.field) from None
        self._submit(generations)
        try:
            _wait(generations, show=use_tqdm and sys.stderr.isatty())
        except BaseException:
            for generation in generations:
                generation.abort()
            raise
        outputs = [generation.result() for generation in generations]
        return outputs[0] if single else outputs

    def generate_async(
        self, inputs: Prompt, sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> Generation:
        """Starts one prompt and returns at once. The result can be awaited, iterated over with `async for` or `for`
        (once for every piece of the answer if `streaming`), waited for with `result()`, and ended with `abort()`."""
        if not _is_prompt(inputs):
            raise RequestError("generate_async takes one prompt; call it once for each", field="inputs")
        generation = self._prepare(inputs, sampling_params, streaming)
        self._submit([generation])
        return generation

    def stats(self) -> dict[str, Any]:
        """What happened since start, over all requests, ready to be written as JSON; see `EngineCounters`."""
        counters = self._scheduler.counters
        # Copied in one go each, because the serving thread may add a key meanwhile.
        counters = dataclasses.replace(counters, replays=counters.replays.copy(), finished=counters.finished.copy())
        totals = dataclasses.asdict(counters)
        return {**totals, "running": self._scheduler.running, "waiting": self._scheduler.waiting}

    def shutdown(self) -> None:
        """Ends serving; requests that still run finish as `cancelled`. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _submit(self, generations: Sequence[Generation]) -> None:
        self._loop.submit([(generation, self._answer_text(generation.params)) for generation in generations])

    def _answer_text(self, params: SamplingParams) -> AnswerText | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return AnswerText(
            self.tokenizer,
            stop_strings=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens or 0,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _prepare(self, inputs: Any, params: SamplingParams | None, streaming: bool) -> Generation:
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params is a {type(params).__name__}, expected SamplingParams", field="sampling_params"
            )
        prompt, token_ids = self._prompt(inputs, params)
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        check_prompt(token_ids, self.limits.vocab_size, self.limits.max_seq_len)
        return Generation(
            request_id=next(self._request_ids),
            prompt=prompt,
            prompt_token_ids=[int(token_id) for token_id in token_ids],
            params=self._fitted(params, len(token_ids)),
            streaming=streaming,
            abort=self._loop.abort,
        )

    def _prompt(self, inputs: Any, params: SamplingParams) -> tuple[str | None, list[int]]:
        """The text, if there is one, and the token ids."""
        if isinstance(inputs, Mapping):
            known = {name: inputs[name] for name in ("prompt", "prompt_token_ids") if name in inputs}
            if len(known) != 1 or len(inputs) != 1:
                raise RequestError(
                    f"a prompt mapping has the keys {sorted(map(str, inputs))}, expected prompt or prompt_token_ids",
                    field="inputs",
                )
            inputs = next(iter(known.values()))
        if isinstance(inputs, str):
            if not inputs:
                raise RequestError("the prompt is empty, expected at least one character", field="prompt")
            if self.tokenizer is None:
                raise RequestError(
                    f"the prompt is text, but {self.model} was loaded without a tokenizer; give token ids, or put "
                    f"{TOKENIZER_FILE} into the directory",
                    field="prompt",
                )
            try:
                inputs.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"the prompt has {inputs[error.start]!r} at character {error.start}, expected text that UTF-8 can "
                    "hold; bytes of another encoding become such characters on a command line",
                    field="prompt",
                ) from None
            return inputs, self.tokenizer.encode(inputs, params.add_special_tokens)
        if isinstance(inputs, np.ndarray):
            inputs = inputs.tolist()
        if not isinstance(inputs, Sequence) or isinstance(inputs, bytes):
            raise RequestError(
                f"the prompt is a {type(inputs).__name__}, expected text or a list of token ids", field="prompt"
            )
        return None, list(inputs)

    def _fitted(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """The caller's parameters, checked against this engine: a copy with its seed drawn and its budget cut to what
        the context leaves."""
        check_stops(params, self.limits.vocab_size)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                "stop is found in the text, but there is no tokenizer; give stop_token_ids", field="stop"
            )
        draft_depth(params.speculative, self.limits.draft_length)
        room = self.limits.max_seq_len - prompt_length
        if (params.min_tokens or 0) > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but after {prompt_length} prompt tokens only {room} fit into the "
                f"{self.limits.max_seq_len} tokens of this engine",
                field="min_tokens",
            )
        # 48 bits: more than enough to differ, and exact in every JSON reader.
        seed = int.from_bytes(os.urandom(6), "little") if params.seed is None else int(params.seed)
        return dataclasses.replace(params, max_tokens=int(min(params.max_tokens, room)), seed=seed)


def _tokenizer(model: Path, tokenizer: str | Path | Tokenizer | None) -> Tokenizer | None:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is not None:
        return Tokenizer(tokenizer)
    return Tokenizer(model) if (model / TOKENIZER_FILE).exists() else None


def _is_prompt(inputs: Any) -> bool:
    """Whether `inputs` is one prompt rather than a list of them."""
    if isinstance(inputs, str | Mapping):
        return True
    if isinstance(inputs, np.ndarray):
        return inputs.ndim == 1 and inputs.size > 0
    if not isinstance(inputs, Sequence):
        raise RequestError(
            f"inputs is a {type(inputs).__name__}, expected text, token ids, or a list of prompts", field="inputs"
        )
    return len(inputs) > 0 and isinstance(inputs[0], numbers.Number)


def _one_for_each(
    prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Sequence) or len(params) != len(prompts):
        found = f"{len(params)} entries" if isinstance(params, Sequence) else f"a {type(params).__name__}"
        raise RequestError(
            f"sampling_params has {found}, expected one SamplingParams, or {len(prompts)} in the order of the prompts",
            field="sampling_params",
        )
    return params


def _wait(generations: Sequence[Generation], show: bool) -> None:
    """Until all have ended, whether well or not."""
    if not show:
        for generation in generations:
            generation.wait()
        return
    from rich.console import Console
    from rich.progress import track

    for generation in track(generations, description="requests", console=Console(stderr=True)):
        generation.wait()
