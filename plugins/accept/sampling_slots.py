"""Sampling parameters of every slot, as a struct of arrays that the batched code indexes by slot.

Written when a request takes a slot (`set`), read in every iteration, moved forward by `commit`. Values are checked here
and nowhere deeper.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

NO_LIMIT = 2**31 - 1
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
# Penalties and finite biases: with them float32 logits stay finite at any temperature, so no row becomes NaN.
MAX_EDIT = 1e9


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}, expected {expected}")


class SamplingSlots:
    """Per-slot arrays, first axis S. A cleared slot is greedy, edits nothing, never stops.

    temperature f32 (0 = greedy); inverse_temperature f32 (1 where greedy); top_k i32 (0 = off); top_p f32 (1 = off);
    min_p f32 (0 = off); repetition_penalty f32 (1 = off); presence_penalty, frequency_penalty f32 (0 = off); seed u64;
    coupled bool (the gumbel rule); min_position i32 (no end-of-text id at an absolute position below it);
    limit i32 (total tokens allowed: a token may stand at position p iff p < limit); eos i32 [S, E] padded with -1;
    bias: per slot (ids i32 [n], values f32 [n]) or None.
    prompt_seen bool [S, V] and output_counts i32 [S, V] exist once a slot has used a penalty, else they are None.
    """

    def __init__(self, slots: int, vocab_size: int, max_eos_ids: int = 8) -> None:
        _require(slots > 0, "slots", slots, "at least 1")
        _require(vocab_size > 0, "vocab_size", vocab_size, "at least 1")
        self.slots = slots
        self.vocab_size = vocab_size
        self.temperature = np.zeros(slots, np.float32)
        self.inverse_temperature = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.repetition_penalty = np.ones(slots, np.float32)
        self.presence_penalty = np.zeros(slots, np.float32)
        self.frequency_penalty = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.coupled = np.zeros(slots, np.bool_)
        self.min_position = np.zeros(slots, np.int32)
        self.limit = np.full(slots, NO_LIMIT, np.int32)
        self.eos = np.full((slots, max_eos_ids), -1, np.int32)
        self.bias: list[tuple[NDArray[np.int32], NDArray[np.float32]] | None] = [None] * slots
        self.penalised = np.zeros(slots, np.bool_)
        # False: the slot's answer is the argmax of the row as it is, as long as min_position and grammar have no say.
        self.judged = np.zeros(slots, np.bool_)
        self.prompt_seen: NDArray[np.bool_] | None = None
        self.output_counts: NDArray[np.int32] | None = None

    def set(
        self,
        slot: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        coupled: bool = False,
        min_position: int = 0,
        limit: int = NO_LIMIT,
        eos_ids: Iterable[int] = (),
        bias: Mapping[int, float] | None = None,
        prompt_ids: Iterable[int] | None = None,
        output_ids: Iterable[int] = (),
    ) -> None:
        """Give `slot` to a request; whatever it held before is gone.

        `prompt_ids` and `output_ids` (tokens committed already, when a request resumes) are read for penalties only; a
        repetition penalty needs `prompt_ids`. Raises ValueError with the parameter's name, value and range, before
        anything is written.
        """
        _require(0 <= slot < self.slots, "slot", slot, f"0..{self.slots - 1}")
        _require(
            temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE,
            "temperature",
            temperature,
            f"0 (greedy) or {MIN_TEMPERATURE}..{MAX_TEMPERATURE}",
        )
        _require(0 <= top_k <= NO_LIMIT, "top_k", top_k, "0 (off) or more")
        _require(0 < top_p <= 1, "top_p", top_p, "above 0, at most 1 (off)")
        _require(0 <= min_p <= 1, "min_p", min_p, "0 (off) to 1")
        _require(
            1 / MAX_EDIT <= repetition_penalty <= MAX_EDIT,
            "repetition_penalty",
            repetition_penalty,
            f"{1 / MAX_EDIT:g}..{MAX_EDIT:g} (1 is off)",
        )
        for name, penalty in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
            _require(-MAX_EDIT <= penalty <= MAX_EDIT, name, penalty, f"{-MAX_EDIT:g}..{MAX_EDIT:g}")
        _require(0 <= seed < 2**64, "seed", seed, "0..2**64-1")
        _require(0 <= min_position <= NO_LIMIT, "min_position", min_position, f"0..{NO_LIMIT}")
        _require(0 <= limit <= NO_LIMIT, "limit", limit, f"0..{NO_LIMIT}")
        eos = self._ids("eos_ids", eos_ids)
        _require(eos.size <= self.eos.shape[1], "number of eos_ids", eos.size, f"at most {self.eos.shape[1]}")
        edits = {} if bias is None else dict(bias)
        bias_ids = self._ids("bias", edits)
        for token, value in edits.items():
            _require(
                value == -math.inf or -MAX_EDIT <= value <= MAX_EDIT,
                f"bias of token {token}",
                value,
                f"{-MAX_EDIT:g}..{MAX_EDIT:g} or -inf (never)",
            )
        penalised = repetition_penalty != 1 or presence_penalty != 0 or frequency_penalty != 0
        _require(
            repetition_penalty == 1 or prompt_ids is not None,
            "prompt_ids",
            None,
            f"the prompt's ids, because repetition_penalty is {repetition_penalty}",
        )
        prompt = self._ids("prompt_ids", () if prompt_ids is None or not penalised else prompt_ids)
        output = self._ids("output_ids", output_ids if penalised else ())

        self.clear(slot)
        self.temperature[slot] = temperature
        self.inverse_temperature[slot] = 1 if temperature == 0 else 1 / temperature
        self.top_k[slot] = top_k
        self.top_p[slot] = top_p
        self.min_p[slot] = min_p
        self.repetition_penalty[slot] = repetition_penalty
        self.presence_penalty[slot] = presence_penalty
        self.frequency_penalty[slot] = frequency_penalty
        self.seed[slot] = seed
        self.coupled[slot] = coupled
        self.min_position[slot] = min_position
        self.limit[slot] = limit
        self.eos[slot, : eos.size] = eos
        if edits:
            self.bias[slot] = (bias_ids, np.fromiter(edits.values(), np.float32, len(edits)))
        self.penalised[slot] = penalised
        self.judged[slot] = temperature != 0 or penalised or bool(edits)
        if penalised:
            if self.prompt_seen is None or self.output_counts is None:
                self.prompt_seen = np.zeros((self.slots, self.vocab_size), np.bool_)
                self.output_counts = np.zeros((self.slots, self.vocab_size), np.int32)
            self.prompt_seen[slot, prompt] = True
            np.add.at(self.output_counts[slot], output, 1)

    def clear(self, slot: int) -> None:
        """Back to what a new slot is."""
        if self.penalised[slot]:
            assert self.prompt_seen is not None
            assert self.output_counts is not None
            self.prompt_seen[slot] = False
            self.output_counts[slot] = 0
        self.temperature[slot] = 0
        self.inverse_temperature[slot] = 1
        self.top_k[slot] = 0
        self.top_p[slot] = 1
        self.min_p[slot] = 0
        self.repetition_penalty[slot] = 1
        self.presence_penalty[slot] = 0
        self.frequency_penalty[slot] = 0
        self.seed[slot] = 0
        self.coupled[slot] = False
        self.min_position[slot] = 0
        self.limit[slot] = NO_LIMIT
        self.eos[slot] = -1
        self.bias[slot] = None
        self.penalised[slot] = False
        self.judged[slot] = False

    def commit(self, slots: NDArray[np.int32], tokens: NDArray[np.int32], count: NDArray[np.int32]) -> None:
        """Add each request's first `count[r]` of tokens [R, T] to its slot's history: what `finish` let through.

        The newest of them is the next anchor and counts as history from then on.
        """
        if self.output_counts is None:
            return
        for request, slot in enumerate(slots.tolist()):
            if self.penalised[slot]:
                np.add.at(self.output_counts[slot], tokens[request, : count[request]], 1)

    def _ids(self, name: str, ids: Iterable[int]) -> NDArray[np.int32]:
        values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        wrong = values[(values < 0) | (values >= self.vocab_size)]
        if wrong.size:
            raise ValueError(f"{name} holds the token id {wrong[0]}, expected ids in 0..{self.vocab_size - 1}")
        return values.astype(np.int32)
