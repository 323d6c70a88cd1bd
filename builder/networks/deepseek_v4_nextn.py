"""The NextN block of DeepSeek-V4 Preview, for MTP drafting (`mtp.py`).

    X_in[j] = e_proj(enorm(embed(t_{i+1}))) + h_proj(hnorm(H_i[j]))      for each stream j
    X_out   = block(X_in, i)                                             window attention, window frequencies, no YaRN
    logits  = head(norm(hc_head(X_out)))

H_i are the target's streams after its last layer, before its hc_head; what is recycled is X_out. The window ring is
long enough to keep every committed row the next token sees behind the rows of a chain.

Source: `spec/dspark.md` section 12.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from twostroke.builder.config import DeepseekV4Config
from twostroke.builder.networks import mtp
from twostroke.builder.networks.deepseek_v4 import HyperConnected, Rows, WindowAttention
from twostroke.builder.networks.layers import Linear, RMSNorm, Rotation, rope_frequencies, weight
from twostroke.plugins.hyper_connection.torch_op import HC_HEAD


class Embedding(nn.Module):
    """An embedding of the block's own, under the name a checkpoint has for it."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.tok_emb = Linear(config.hidden_size, config.vocab_size)


class NextN(HyperConnected):
    """The block and what joins it to the target: `mtp.0.*` of the checkpoint."""

    attn: WindowAttention

    def __init__(self, config: DeepseekV4Config, depth: int) -> None:
        super().__init__(config, WindowAttention(config, depth), hashed=False)
        hidden, streams = config.hidden_size, config.hc_mult
        self.enorm, self.hnorm = RMSNorm(hidden, config.rms_norm_eps), RMSNorm(hidden, config.rms_norm_eps)
        self.e_proj, self.h_proj = Linear(hidden, hidden), Linear(hidden, hidden)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.hc_head_fn, self.hc_head_base = weight(streams, streams * hidden), weight(streams)
        self.hc_head_scale = weight(1)


class NextNChain(mtp.Chain):
    """The draft network for chains of up to `depth` tokens. Embedding and head are the target's, except those of the
    names in `own`."""

    frequencies: Tensor

    def __init__(self, config: DeepseekV4Config, depth: int, max_seq_len: int, own: frozenset[str]) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.width = config.hc_mult * config.hidden_size
        block = NextN(config, depth)
        if "mtp.0.emb.tok_emb.weight" in own:
            block.emb = Embedding(config)
        else:
            self.embed = Linear(config.hidden_size, config.vocab_size)
        (block if "mtp.0.head.weight" in own else self).head = Linear(config.hidden_size, config.vocab_size)
        self.mtp = nn.ModuleList([block])
        self.layer_state = block.attn.state("mtp.0")
        self.register_buffer("frequencies", rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None))

    @property
    def block(self) -> NextN:
        """The one NextN block."""
        return cast(NextN, self.mtp[0])

    def run(
        self, next_ids: Tensor, hidden: Tensor, rows: mtp.ChainRows, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """X_out [N, m*D] and the window ring with the rows; `hidden` [N, m*D] holds the streams side by side."""
        config, block = self.config, self.block
        turn = Rotation.at(rows.positions, self.frequencies, config.head_dim)
        embedding = cast(Embedding, block.emb).tok_emb if hasattr(block, "emb") else self.embed
        token = block.e_proj(block.enorm(cast(Linear, embedding).rows(next_ids)))
        past = block.h_proj(block.hnorm(hidden.reshape(-1, config.hc_mult, config.hidden_size)))
        flat = Rows(next_ids, rows.positions, rows.slots, rows.row_start, turn)
        streams, state = block(token[:, None, :] + past, flat, state)
        return streams.reshape(streams.shape[0], -1), state

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V]: the streams collapsed, normed, through the head."""
        config, block = self.config, self.block
        streams = hidden.reshape(-1, config.hc_mult, config.hidden_size)
        collapsed = HC_HEAD.overload(
            streams, block.hc_head_fn, block.hc_head_base, block.hc_head_scale, config.hc_eps, config.rms_norm_eps
        )
        head = block.head if hasattr(block, "head") else self.head
        out: Tensor = cast(Linear, head)(block.norm(collapsed))
        return out


class Observe(mtp.Observe, NextNChain):
    """Draft-extend over this block."""


class Next(mtp.Next, NextNChain):
    """One row more of this block."""


class Pick(mtp.Pick, NextNChain):
    """A token from the streams this block left."""


STEPS = (Observe, Next, Pick)
