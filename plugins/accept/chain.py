"""One request's chain, judged row by row and only as far as it holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .logit_processor import process_row
from .philox import Purpose, gumbel_rows
from .sampling_slots import SamplingSlots

RESIDUAL_FLOOR = 1e-8


@dataclass(frozen=True)
class Verdict:
    """How many drafted tokens stay, and the token after them: known, or to be drawn.

    `draw` None: it is `token`. Otherwise it is the argmax of the request's scores plus the noise of that purpose under
    (anchor position, accepted + 1).
    """

    accepted: int
    token: int = -1
    draw: Purpose | None = None


class ChainJudge:
    """Judges chains over V tokens; owns [V] scratch. `exhausted_rows` counts rows that allowed no token."""

    def __init__(self, vocab_size: int) -> None:
        self.exhausted_rows = 0
        self._p = np.empty(vocab_size, np.float64)
        self._q = np.empty(vocab_size, np.float64)
        self._noise = np.empty((1, vocab_size), np.float32)

    def judge(
        self,
        rows: NDArray[np.float32],
        chain: Sequence[int],
        draft_logits: NDArray[np.float32],
        u: NDArray[np.float64],
        slot: int,
        anchor_position: int,
        sampling: SamplingSlots,
        allowed: NDArray[np.bool_] | None,
        scores_out: NDArray[np.float32],
    ) -> Verdict:
        """Judge x_1..x_n = `chain`, ids in [0, V).

        rows [> n, V], edited in place up to the deciding one; draft_logits [>= n, V]; u [>= n], the uniforms of the
        accept tests; allowed bool [> n, V] or None. scores_out [V] receives what a draw needs: log weights, up to a
        constant.
        """
        greedy = sampling.temperature[slot] == 0
        for i in range(len(chain) + 1):
            row = rows[i]
            mask = None if allowed is None else allowed[i]
            position = anchor_position + 1 + i
            if not process_row(row, sampling, slot, position, chain[:i], mask):
                self.exhausted_rows += 1
            drafted = chain[i] if i < len(chain) else None
            if greedy or sampling.coupled[slot]:
                token = int(row.argmax()) if greedy else self._coupled_pick(row, sampling, slot, position)
                if token != drafted:
                    return Verdict(i, token=token)
                continue
            if drafted is None or not self._proposal(draft_logits[i], sampling.inverse_temperature[slot]):
                break
            p, q = _softmax(row, self._p), self._q
            if u[i] * q[drafted] < p[drafted]:
                continue
            np.maximum(np.subtract(p, q, out=q), 0, out=q)
            residual = q if q.sum() > RESIDUAL_FLOOR else p
            with np.errstate(divide="ignore"):
                scores_out[:] = np.log(residual, out=residual)
            return Verdict(i, draw=Purpose.RESIDUAL)
        scores_out[:] = row
        return Verdict(i, draw=Purpose.BONUS)

    def _coupled_pick(self, row: NDArray[np.float32], sampling: SamplingSlots, slot: int, position: int) -> int:
        gumbel_rows(sampling.seed[slot], position, 0, Purpose.COUPLED, self._noise)
        # float32, as the draft adds it: the pick is then one function of (row, seed, position) on both sides.
        return int(np.add(row, self._noise[0], out=self._noise[0]).argmax())

    def _proposal(self, draft_row: NDArray[np.float32], inverse_temperature: np.float32) -> bool:
        """Put q = softmax(draft_row * inverse_temperature) into the scratch; False if that is no distribution (NaN)."""
        np.multiply(draft_row, np.float64(inverse_temperature), out=self._q)
        if not np.isfinite(self._q.max()):
            return False
        _softmax(self._q, self._q)
        return True


def _softmax(z: NDArray[np.floating], out: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(z) / sum exp(z) in float64; `out` may be `z`."""
    np.subtract(z, np.float64(z.max()), out=out)
    np.exp(out, out=out)
    return np.divide(out, out.sum(), out=out)
