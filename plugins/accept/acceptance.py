"""Batched acceptance in numpy: the draft's noise, the verdict on a block, and where the block ends.

Greedy slots that edit nothing are judged for the whole batch at once, without allocating; every other request is judged
by itself, row by row, and only as far as its chain holds. A request's result is a function of its own rows, slot and
position: batch mates cannot change a bit of it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .chain import ChainJudge
from .philox import Purpose, gumbel_rows, uniforms
from .sampling_slots import SamplingSlots

# Final picks whose noise is made in one go hold at most this many values (or one row, if that is longer).
_NOISE_VALUES = 1 << 16

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


class FinishReason(IntEnum):
    """Why a sequence ended, as `finish` reports it."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True)
class _Draw:
    """A token still to be drawn: for which request, after how many drafted ones, with which noise."""

    request: int
    accepted: int
    purpose: Purpose


class Acceptor:
    """Acceptance for up to `max_requests` requests and `draft_length` drafted tokens each; owns the scratch for it.

    Every method raises ValueError with the name, the shape found and the shape expected.
    """

    def __init__(self, max_requests: int, draft_length: int, vocab_size: int) -> None:
        if max_requests < 1 or draft_length < 0 or vocab_size < 1:
            raise ValueError(
                f"Acceptor(max_requests={max_requests}, draft_length={draft_length}, vocab_size={vocab_size}), "
                "expected at least 1, 0 and 1"
            )
        self.max_requests = max_requests
        self.draft_length = draft_length
        self.vocab_size = vocab_size
        rows = draft_length + 1
        self._column = np.arange(rows, dtype=np.int32)
        self._picks = np.empty(max_requests * rows, np.intp)
        self._wide = np.empty(max_requests * rows, np.intp)
        self._columns = np.empty(max_requests * rows, np.int32)
        self._narrow = np.empty(max_requests * rows, np.int32)
        self._flags = np.empty((2, max_requests * rows), np.bool_)
        self._request_flags = np.empty((2, max_requests), np.bool_)
        self._request_ints = np.empty(max_requests, np.int32)
        self._request_floats = np.empty(max_requests, np.float32)
        self._eos = np.empty((0, 0), np.int32)
        self._judge = ChainJudge(vocab_size)
        self._scores = np.empty((max_requests, vocab_size), np.float32)
        self._noise = np.empty((max(1, min(max_requests, _NOISE_VALUES // vocab_size)), vocab_size), np.float32)
        # The buffer that draft_noise last wrote (kept alive, so that its address stays its own) and its nonzero rows.
        self._noise_buffer: Floats | None = None
        self._noise_dirty = np.ones(max_requests, np.bool_)

    @property
    def exhausted_rows(self) -> int:
        """Rows so far on which bias, bans and grammar forbade every token; id 0 is the only choice there."""
        return self._judge.exhausted_rows

    def draft_noise(
        self,
        slots: Ints,
        anchor_position: Ints,
        sampling: SamplingSlots,
        noise_out: Floats,
        inverse_temperature_out: Floats,
    ) -> None:
        """What the draft's picks add: x_k = argmax_v(draft_logits[k-1, v] * inverse_temperature + noise[k-1, v]).

        slots, anchor_position [R]; noise_out [R, G, V], C-contiguous; inverse_temperature_out [R]. Greedy slots get 1
        and 0. Rows known to be zero are not written again: between calls with the same buffer only this method may
        write it.
        """
        requests, length = slots.shape[0], noise_out.shape[1]
        self._check_requests(slots, sampling)
        self._check("anchor_position", anchor_position, (requests,))
        self._check("noise_out", noise_out, (requests, length, self.vocab_size))
        self._check("inverse_temperature_out", inverse_temperature_out, (requests,))
        if not noise_out.flags.c_contiguous:
            raise ValueError(f"noise_out has strides {noise_out.strides}, expected a C-contiguous array")
        self._follow_buffer(noise_out)
        np.take(sampling.inverse_temperature, slots, out=inverse_temperature_out, mode="clip")
        temperature = np.take(sampling.temperature, slots, out=self._request_floats[:requests], mode="clip")
        sampled = np.greater(temperature, 0, out=self._request_flags[0, :requests])
        for request in range(requests):
            if not sampled[request] and self._noise_dirty[request]:
                noise_out[request] = 0
                self._noise_dirty[request] = False
        if length == 0 or not sampled.any():
            return
        chosen = np.flatnonzero(sampled)
        self._noise_dirty[chosen] = True
        slot = slots[chosen, None]
        anchor = anchor_position[chosen, None].astype(np.int64)
        coupled = sampling.coupled[slot]
        k = np.arange(1, length + 1)
        gumbel_rows(
            np.repeat(sampling.seed[slot], length),
            np.where(coupled, anchor + k, anchor).ravel(),
            np.where(coupled, 0, k).ravel(),
            np.repeat(np.where(coupled, Purpose.COUPLED, Purpose.DRAFT), length),
            noise_out.reshape(requests * length, self.vocab_size),
            (chosen[:, None] * length + np.arange(length)).ravel(),
        )

    def accept(
        self,
        target_logits: Floats,
        draft_tokens: Ints,
        draft_logits: Floats,
        draft_length: Ints,
        slots: Ints,
        anchor_position: Ints,
        sampling: SamplingSlots,
        grammar_mask: Bools | None = None,
        *,
        tokens_out: Ints,
        count_out: Ints,
        accepted_out: Ints,
    ) -> None:
        """Judge every request's block and draw the token after what it keeps.

        target_logits [R, T, V]: row i judges the token at anchor_position + 1 + i; edited in place by the logit
        processor in rows 0..accepted, where a slot asks for it. draft_tokens [R, G], draft_logits [R, G, V],
        draft_length [R] in 0..G with G = T-1; an id outside [0, V) ends its chain there. Greedy slots do not read
        draft_logits. slots, anchor_position [R]; grammar_mask [R, T, V], True = allowed. Out: tokens_out [R, T], zero
        from count on; count_out [R] = accepted + 1; accepted_out [R].
        """
        requests, rows = target_logits.shape[:2]
        drafts = rows - 1
        self._check_requests(slots, sampling)
        self._check_rows("target_logits", rows)
        self._check("target_logits", target_logits, (slots.shape[0], rows, self.vocab_size))
        self._check("draft_tokens", draft_tokens, (requests, drafts))
        self._check("draft_logits", draft_logits, (requests, drafts, self.vocab_size))
        for name, value in (("draft_length", draft_length), ("anchor_position", anchor_position)):
            self._check(name, value, (requests,))
        if grammar_mask is not None:
            self._check("grammar_mask", grammar_mask, target_logits.shape)
        self._check("tokens_out", tokens_out, (requests, rows))
        self._check("count_out", count_out, (requests,))
        self._check("accepted_out", accepted_out, (requests,))
        if requests == 0:
            return
        if draft_length.min() < 0 or draft_length.max() > drafts:
            raise ValueError(f"draft_length spans {draft_length.min()}..{draft_length.max()}, expected 0..{drafts}")

        self._accept_greedy(target_logits, draft_tokens, draft_length, tokens_out, count_out, accepted_out)
        judged = self._judged(slots, anchor_position, sampling, grammar_mask is not None)
        if not judged.any():
            return
        chosen = np.flatnonzero(judged)
        u = uniforms(
            sampling.seed[slots[chosen], None],
            anchor_position[chosen, None],
            np.arange(1, rows),
            Purpose.ACCEPT,
        )
        draws: list[_Draw] = []
        for index, request in enumerate(chosen.tolist()):
            chain = self._chain(draft_tokens[request], int(draft_length[request]))
            verdict = self._judge.judge(
                target_logits[request],
                chain,
                draft_logits[request],
                u[index],
                int(slots[request]),
                int(anchor_position[request]),
                sampling,
                None if grammar_mask is None else grammar_mask[request],
                self._scores[len(draws)],
            )
            accepted = verdict.accepted
            accepted_out[request] = accepted
            count_out[request] = accepted + 1
            tokens_out[request, :accepted] = chain[:accepted]
            tokens_out[request, accepted] = verdict.token
            tokens_out[request, accepted + 1 :] = 0
            if verdict.draw is not None:
                draws.append(_Draw(request, accepted, verdict.draw))
        self._draw(draws, slots, anchor_position, sampling, tokens_out)

    def finish(
        self,
        tokens: Ints,
        count: Ints,
        slots: Ints,
        anchor_position: Ints,
        sampling: SamplingSlots,
        ignore_eos: Bools | None = None,
        *,
        done_out: Bools,
        reason_out: NDArray[np.int8],
    ) -> None:
        """Cut each block after its first end-of-text id (kept, counted) and at its slot's limit, whichever comes first.

        tokens [R, T] and count [R] are edited in place (zero from the new count on). Token j stands at position
        anchor_position + 1 + j and may be emitted iff that is below the limit. done_out [R]; reason_out [R] holds a
        `FinishReason`: an end-of-text id in the last place allowed is a STOP, and a block that fills the limit
        without one is LENGTH at once, so that no round runs after it. ignore_eos bool [R]: end-of-text ids are
        ordinary tokens there.
        """
        requests, rows = tokens.shape
        self._check_requests(slots, sampling)
        self._check_rows("tokens", rows)
        self._check("tokens", tokens, (slots.shape[0], rows))
        for name, value in (("count", count), ("anchor_position", anchor_position), ("done_out", done_out)):
            self._check(name, value, (requests,))
        self._check("reason_out", reason_out, (requests,))
        if ignore_eos is not None:
            self._check("ignore_eos", ignore_eos, (requests,))
        room = np.take(sampling.limit, slots, out=self._request_ints[:requests], mode="clip")
        np.subtract(room, anchor_position, out=room)
        np.subtract(room, 1, out=room)
        np.maximum(room, 0, out=room)
        np.minimum(count, room, out=count)
        np.greater_equal(count, room, out=done_out)
        np.copyto(reason_out, FinishReason.NONE)
        np.copyto(reason_out, FinishReason.LENGTH, where=done_out)

        hits = self._end_of_text(tokens, count, slots, sampling)
        if ignore_eos is not None:
            np.copyto(hits, False, where=ignore_eos[:, None])
        stopped = np.logical_or.reduce(hits, axis=1, out=self._request_flags[0, :requests])
        first = np.argmax(hits, axis=1, out=self._picks[:requests])
        np.add(first, 1, out=first)
        np.copyto(count, first, where=stopped, casting="same_kind")
        np.logical_or(done_out, stopped, out=done_out)
        np.copyto(reason_out, FinishReason.STOP, where=stopped)
        np.copyto(tokens, 0, where=self._past(count, requests, rows))

    def _accept_greedy(
        self, target_logits: Floats, draft_tokens: Ints, draft_length: Ints, tokens: Ints, count: Ints, accepted: Ints
    ) -> None:
        """The greedy rule for the whole batch on the rows as they are; an id outside [0, V) equals no argmax."""
        requests, rows = tokens.shape
        drafts = rows - 1
        picks = np.argmax(target_logits, axis=2, out=_shaped(self._picks, requests, rows))
        wide = _shaped(self._wide, requests, rows)
        np.copyto(wide[:, :drafts], draft_tokens)
        np.copyto(wide, -1, where=self._past(draft_length, requests, rows))
        agree = np.equal(picks, wide, out=_shaped(self._flags[0], requests, rows))
        held = _shaped(self._narrow, requests, rows)
        np.copyto(held, agree)
        for k in range(1, rows):
            np.multiply(held[:, k], held[:, k - 1], out=held[:, k])
        np.add.reduce(held, axis=1, out=accepted)
        np.add(accepted, 1, out=count)
        np.copyto(tokens, picks, casting="same_kind")
        np.copyto(tokens, 0, where=self._past(count, requests, rows))

    def _judged(self, slots: Ints, anchor_position: Ints, sampling: SamplingSlots, masked: bool) -> Bools:
        """Which requests [R] the batch-wide greedy rule does not cover."""
        requests = slots.shape[0]
        judged = np.take(sampling.judged, slots, out=self._request_flags[0, :requests], mode="clip")
        if masked:
            judged[:] = True
            return judged
        ahead = np.take(sampling.min_position, slots, out=self._request_ints[:requests], mode="clip")
        np.subtract(ahead, anchor_position, out=ahead)
        banned = np.greater(ahead, 1, out=self._request_flags[1, :requests])
        return np.logical_or(judged, banned, out=judged)

    def _chain(self, draft_tokens: Ints, length: int) -> list[int]:
        """The drafted ids before the first one outside [0, V)."""
        chain: list[int] = draft_tokens[:length].tolist()
        for k, token in enumerate(chain):
            if not 0 <= token < self.vocab_size:
                return chain[:k]
        return chain

    def _draw(
        self, draws: list[_Draw], slots: Ints, anchor_position: Ints, sampling: SamplingSlots, tokens: Ints
    ) -> None:
        """Gumbel-max over the scores of each draw, a few rows of noise at a time."""
        step = self._noise.shape[0]
        for first in range(0, len(draws), step):
            part = draws[first : first + step]
            requests = [draw.request for draw in part]
            noise = self._noise[: len(part)]
            gumbel_rows(
                sampling.seed[slots[requests]],
                anchor_position[requests],
                [draw.accepted + 1 for draw in part],
                [draw.purpose for draw in part],
                noise,
            )
            np.add(self._scores[first : first + len(part)], noise, out=noise)
            tokens[requests, [draw.accepted for draw in part]] = noise.argmax(axis=1)

    def _end_of_text(self, tokens: Ints, count: Ints, slots: Ints, sampling: SamplingSlots) -> Bools:
        """Where tokens [R, T] hold one of their slot's end-of-text ids before count: bool [R, T]."""
        requests, rows = tokens.shape
        width = sampling.eos.shape[1]
        if self._eos.shape[1] != width:
            self._eos = np.empty((self.max_requests, width), np.int32)
        eos = np.take(sampling.eos, slots, axis=0, out=self._eos[:requests], mode="clip")
        hits = _shaped(self._flags[0], requests, rows)
        equal = _shaped(self._flags[1], requests, rows)
        spread = _shaped(self._narrow, requests, rows)
        hits[:] = False
        for column in range(width):
            np.copyto(spread, eos[:, column, None])
            np.equal(tokens, spread, out=equal)
            np.logical_or(hits, equal, out=hits)
        np.copyto(hits, False, where=self._past(count, requests, rows))
        return hits

    def _past(self, count: Ints, requests: int, rows: int) -> Bools:
        """Which columns of [R, T] are not among the first count[r]; scratch, good until the next call.

        Both sides are spread out by copies first: a comparison that broadcasts allocates an iterator, every time.
        """
        columns = _shaped(self._columns, requests, rows)
        spread = _shaped(self._narrow, requests, rows)
        np.copyto(columns, self._column[:rows])
        np.copyto(spread, count[:, None])
        return np.greater_equal(columns, spread, out=_shaped(self._flags[1], requests, rows))

    def _follow_buffer(self, noise_out: Floats) -> None:
        known = self._noise_buffer
        if known is None or _place(known) != _place(noise_out):
            self._noise_buffer = noise_out
            self._noise_dirty[:] = True

    def _check_requests(self, slots: Ints, sampling: SamplingSlots) -> None:
        if sampling.vocab_size != self.vocab_size:
            raise ValueError(f"sampling has a vocabulary of {sampling.vocab_size}, expected {self.vocab_size}")
        if slots.ndim != 1 or slots.shape[0] > self.max_requests:
            raise ValueError(f"slots has shape {slots.shape}, expected at most ({self.max_requests},)")
        if slots.shape[0] and not 0 <= slots.min() <= slots.max() < sampling.slots:
            raise ValueError(f"slots spans {slots.min()}..{slots.max()}, expected 0..{sampling.slots - 1}")

    def _check_rows(self, name: str, rows: int) -> None:
        if not 1 <= rows <= self.draft_length + 1:
            raise ValueError(f"{name} has {rows} rows per request, expected 1..{self.draft_length + 1}")

    @staticmethod
    def _check(name: str, array: NDArray[np.generic], shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")


def _shaped(flat: NDArray[Scalar], requests: int, columns: int) -> NDArray[Scalar]:
    """The leading values of a flat scratch array as a contiguous [R, columns]."""
    return flat[: requests * columns].reshape(requests, columns)


def _place(buffer: Floats) -> tuple[int, tuple[int, ...]]:
    """Where a noise buffer's rows lie: address and what follows the request axis."""
    return buffer.__array_interface__["data"][0], buffer.shape[1:]
