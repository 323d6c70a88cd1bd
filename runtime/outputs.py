"""What a request gives back. Names are those of TensorRT-LLM's `RequestOutput` and `CompletionOutput`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twostroke.runtime.counters import Acceptance

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class CompletionOutput:
    """One answer, as far as it has come.

    `stop_reason` is the stop string or stop token id that ended it; None for end of text and for every other reason.
    `generation_logits` f32 [length, V] are the target's rows that judged the tokens, where they were asked for.
    The `_diff` fields hold what came since the output before this one of the same stream.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    generation_logits: NDArray[np.float32] | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens of the answer."""
        return len(self.token_ids)


@dataclass(slots=True)
class RequestOutput:
    """A request with its answers. `seed` is the one that was used, drawn if none was given; `acceptance` is what
    speculation did for this request so far, None while it waits."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int | None = None
    acceptance: Acceptance | None = None
