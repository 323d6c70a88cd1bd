"""Logit processing, picking and chain acceptance: which drafted tokens the target keeps, and the token after them.

Target rows p_1..p_T (T = G+1) judge the drafted chain x_1..x_G. Each request follows one of three rules:

- greedy (temperature 0): x_k stays iff x_k = argmax p_k; then the argmax of the first row that disagreed, or of row T.
- rejection (default): x_k stays iff u_k q_k(x_k) < p_k(x_k). At the first refusal the token is drawn from
  (p_k - q_k)+ / sum (p_k - q_k)+, after a full chain from p_T. The result is distributed exactly as the target's own
  samples (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).
- gumbel (`coupled`): both sides pick argmax_v(z_v + g(seed, position, v)); x_k stays iff it is the target's pick. The
  pick has distribution softmax(z), and as g knows neither the block nor the draft, a seeded answer is the same token
  sequence with any draft, block length or batch, and without speculation.

Draws are Gumbel-max: argmax_v(log w_v + g_v) with g = -log(-log u) has distribution w / sum w. All u come from
Philox4x32-10 (Salmon et al., SC 2011), a pure function of (request seed, position, k, purpose): no state, so batch
mates and earlier traffic cannot matter. p is what stands after bias, penalties, bans, grammar, temperature and
cut-offs; q = softmax(draft logits / temperature) is what the draft really drew from.

`reference.py` is the specification (float64, one request); `acceptance.py` is the numpy implementation for engines on
the CPU. Numpy only. Letters: R requests, S slots, G drafted tokens, T = G+1 rows, V vocabulary, E end-of-text ids.
"""

from .acceptance import Acceptor, FinishReason
from .logit_processor import process_row
from .philox import Purpose, gumbel_rows, philox4x32, uniforms
from .sampling_slots import SamplingSlots

__all__ = [
    "Acceptor",
    "FinishReason",
    "Purpose",
    "SamplingSlots",
    "gumbel_rows",
    "philox4x32",
    "process_row",
    "uniforms",
]
