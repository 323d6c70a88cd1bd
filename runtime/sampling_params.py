"""What a caller asks of one request.

Field names and defaults are those of TensorRT-LLM's `SamplingParams`, so that calling code moves over unchanged;
`logit_bias`, `coupling` and `speculative` are ours.

Every field is honoured, or refused at any other value than its default by a RequestError that names it. None is ever
accepted and ignored.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from twostroke.engines.errors import RequestError
from twostroke.plugins.accept.sampling_slots import MAX_EDIT, MAX_TEMPERATURE, MIN_TEMPERATURE

_LATER = "arrives in a later version"
_NO_BEAMS = "there is no beam search"

# Fields that only their default value is accepted for, and what to do instead.
NOT_SERVED: Mapping[str, str] = {
    "bad": "give single tokens in bad_token_ids",
    "embedding_bias": "give logit_bias, a mapping of token id to the number added to its logit",
    "logits_processor": "give logit_bias",
    "apply_batched_logits_processor": "give logit_bias",
    "n": f"a number of answers to one prompt {_LATER}; send the prompt several times with different seeds",
    "best_of": f"a number of answers to one prompt {_LATER}",
    "use_beam_search": _NO_BEAMS,
    "top_p_min": "top_p does not decay",
    "top_p_reset_ids": "top_p does not decay",
    "top_p_decay": "top_p does not decay",
    "beam_search_diversity_rate": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "beam_width_array": _NO_BEAMS,
    "no_repeat_ngram_size": "give repetition_penalty or frequency_penalty",
    "prompt_ignore_length": "penalties read the whole prompt",
    "logprobs": f"it {_LATER}; return_generation_logits gives the full rows now",
    "prompt_logprobs": f"it {_LATER}",
    "logprobs_mode": f"logprobs {_LATER}",
    "logprobs_simple_format": f"logprobs {_LATER}",
    "prompt_logprobs_simple_format": f"prompt_logprobs {_LATER}",
    "return_context_logits": f"it {_LATER}",
    "exclude_input_from_output": "read the prompt from prompt_token_ids of the output",
    "return_encoder_output": "there is no encoder",
    "return_perf_metrics": f"it {_LATER}; LLM.stats() has the counters of all requests",
    "additional_model_outputs": "engines have no further outputs",
    "lookahead_config": "the draft method is fixed by the engine; speculative sets its length",
    "guided_decoding": f"it {_LATER}",
    "spaces_between_special_tokens": "byte-level tokenizers put none there",
}


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; checked when made, and again when it is submitted.

    Greedy unless a sampling field is given: temperature, top_k, top_p and min_p all None, or temperature 0, or top_k 1,
    or top_p 0. With one of the cut-offs and no temperature, temperature is 1. top_k 0 keeps every token.

    - `max_tokens`: new tokens at most; what exceeds the engine's length is cut, and the finish reason says `length`.
    - `min_tokens`: before so many tokens are there, end-of-text and stop ids are never chosen, and stop strings do not
      count.
    - `end_id` replaces the model's end-of-text ids, -1 means none; `ignore_eos` lets them pass. `pad_id` may hold any
      id: answers are lists of their own length, nothing is ever padded.
    - `stop`: the answer ends with the token that completes one of the strings; its text ends before the string, or
      after it with `include_stop_str_in_output`.
    - `stop_token_ids`: the answer ends with the first of them. That token, like end of text, stays in `token_ids`; its
      text is left out unless `include_stop_str_in_output`.
    - `bad_token_ids` are never chosen; `logit_bias` is added to the logits of its ids (-inf: never).
    - `repetition_penalty` reads prompt and answer, `presence_penalty` and `frequency_penalty` the answer.
    - `seed`: 0..2**64-1; None draws one, reported with the output.
    - `coupling`: "rejection" keeps drafted tokens by rejection sampling; "gumbel" gives a seeded request the tokens it
      gets without speculation, at some cost in acceptance.
    - `speculative`: None for the engine's draft length, "off" (or 0), or a shorter length.
    - `return_generation_logits`: the target's rows that judged each token of the answer, as the model gave them.
    - `detokenize` False leaves `text` empty. `skip_special_tokens` keeps control tokens out of the text.
    - `add_special_tokens` lets the tokenizer open a text prompt with its begin-of-text token.
    - `truncate_prompt_tokens` keeps the last so many tokens of the prompt.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False

    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False

    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    prompt_ignore_length: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Any = None
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[Any] | None = None

    lookahead_config: Any = None
    guided_decoding: Any = None

    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    logit_bias: Mapping[int, float] | None = None
    coupling: Literal["rejection", "gumbel"] = "rejection"
    speculative: int | Literal["off"] | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """RequestError names the first field out of range, or every field that is not served, all at once."""
        self._refuse_what_is_not_served()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        _whole("end_id", self.end_id, -1, None)
        _whole("pad_id", self.pad_id, -1, None)
        _whole("top_k", self.top_k, 0, 2**31 - 1, "0 (off) or more")
        _real("top_p", self.top_p, 0.0, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if self.temperature is not None and 0 < self.temperature < MIN_TEMPERATURE:
            raise _wrong("temperature", self.temperature, f"0 (greedy) or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}")
        _whole("seed", self.seed, 0, 2**64 - 1)
        _real("repetition_penalty", self.repetition_penalty, 1 / MAX_EDIT, MAX_EDIT)
        _real("presence_penalty", self.presence_penalty, -MAX_EDIT, MAX_EDIT)
        _real("frequency_penalty", self.frequency_penalty, -MAX_EDIT, MAX_EDIT)
        _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None)
        _token_list("stop_token_ids", self.stop_token_ids)
        _token_list("bad_token_ids", self.bad_token_ids)
        self._validate_stop_strings()
        self._validate_logit_bias()
        if self.coupling not in ("rejection", "gumbel"):
            raise _wrong("coupling", self.coupling, "'rejection' or 'gumbel'")
        if self.speculative != "off":
            _whole("speculative", self.speculative, 0, None, "None, 'off' or a draft length")

    def _refuse_what_is_not_served(self) -> None:
        refused = [
            (name, value, default)
            for name, default in _DEFAULTS.items()
            if name in NOT_SERVED
            and (value := getattr(self, name)) is not default
            and not (type(value) is type(default) and value == default)
            and not (name == "best_of" and type(value) is int and value == 1)
        ]
        if refused:
            listed = "; ".join(
                f"{name}={_shown(value)} is not supported, only {default!r} is accepted ({NOT_SERVED[name]})"
                for name, value, default in refused
            )
            raise RequestError(listed, field=refused[0][0])

    def _validate_stop_strings(self) -> None:
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        if strings is None:
            return
        if not isinstance(strings, list | tuple) or not all(isinstance(each, str) and each for each in strings):
            raise _wrong("stop", self.stop, "a string or a list of strings, none of them empty")
        if strings and not self.detokenize:
            raise RequestError("stop needs detokenize=True, because stop strings are found in the text", field="stop")

    def _validate_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _wrong("logit_bias", self.logit_bias, "a mapping of token id to number")
        for token, value in self.logit_bias.items():
            _whole("logit_bias", token, 0, None, "token ids as keys")
            if not _is_real(value) or not (value == -math.inf or -MAX_EDIT <= value <= MAX_EDIT):
                expected = f"a number from {-MAX_EDIT:g} to {MAX_EDIT:g}, or -inf (never)"
                raise _wrong(f"logit_bias of token {token}", value, expected, "logit_bias")

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax of its processed row."""
        unset = self.temperature is None and self.top_k is None and self.top_p is None and self.min_p is None
        return unset or self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def bias(self) -> dict[int, float]:
        """What is added to the logits: `logit_bias`, and -inf for `bad_token_ids`."""
        return {**(self.logit_bias or {}), **dict.fromkeys(self.bad_token_ids or (), -math.inf)}

    def judging(self) -> dict[str, Any]:
        """What decides how rows are processed and accepted, with every None resolved: keywords of `SamplingSlots.set`.

        Needs a seed unless the request is greedy.
        """
        greedy = self.greedy
        if self.seed is None and not greedy:
            raise ValueError("a sampled request needs its seed drawn before it is served")
        return {
            "temperature": 0.0 if greedy else 1.0 if self.temperature is None else float(self.temperature),
            "top_k": 0 if greedy else self.top_k or 0,
            "top_p": 1.0 if greedy or self.top_p is None else float(self.top_p),
            "min_p": 0.0 if greedy else float(self.min_p or 0.0),
            "repetition_penalty": 1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            "presence_penalty": float(self.presence_penalty or 0.0),
            "frequency_penalty": float(self.frequency_penalty or 0.0),
            "seed": self.seed or 0,
            "coupled": self.coupling == "gumbel",
            "bias": self.bias or None,
        }


_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
_FLAGS = tuple(name for name, default in _DEFAULTS.items() if isinstance(default, bool))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong(name: str, value: object, expected: str, field: str | None = None) -> RequestError:
    return RequestError(f"{name} is {_shown(value)}, expected {expected}", field=field or name)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _whole(name: str, value: object, low: int, high: int | None, expected: str | None = None) -> None:
    if value is None:
        if _DEFAULTS.get(name, 0) is not None:
            raise _wrong(name, value, "a whole number")
        return
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fits or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        span = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        raise _wrong(name, value, expected or span)


def _real(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if not _is_real(value) or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        span = f"a number from {low:g} to {high:g}" if math.isfinite(high) else "a finite number"
        raise _wrong(name, value, span if math.isinf(low) or math.isfinite(high) else f"{span} of at least {low:g}")


def _token_list(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _wrong(name, value, "a list of token ids")
    for token in value:
        if not isinstance(token, numbers.Integral) or isinstance(token, bool) or token < 0:
            raise _wrong(name, value, "a list of token ids, whole numbers of at least 0")
