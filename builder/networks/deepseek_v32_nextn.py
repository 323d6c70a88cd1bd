"""The MTP layer of DeepSeek-V3.2, for MTP drafting (`mtp.py`): the layer behind the target's last.

    u_i = eh_proj([ enorm(embed(t_{i+1})) | hnorm(H_i) ])            embedding first
    g_i = shared_head.norm(layer(u_i, i))                            a layer of the target's kind, with its own indexer
    logits = head(g_i)

H_i is the target's hidden after `model.norm`; what is recycled is g_i, after the norm too. All rows are paged, by the
target's own page table. Source: `spec/deepseek_v32.md` section 8.2, which gives the evidence for each choice.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from twostroke.builder.networks import mtp
from twostroke.builder.networks.deepseek_v32 import Flat, Layer, frequencies_of
from twostroke.builder.networks.deepseek_v32_checkpoint import DeepseekV32Config, draft_prefix
from twostroke.builder.networks.layers import Linear, RMSNorm


class SharedHead(nn.Module):
    """The final norm of the draft, and the head where it is not the target's."""

    def __init__(self, config: DeepseekV32Config, own_head: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if own_head:
            self.head = Linear(config.hidden_size, config.vocab_size)


class NextNLayer(Layer):
    """A layer of experts and what joins it to the target: `model.layers.{num_hidden_layers}.*` of the checkpoint."""

    def __init__(self, config: DeepseekV32Config, max_seq_len: int, own_embedding: bool, own_head: bool) -> None:
        super().__init__(config, max_seq_len, dense=False)
        hidden = config.hidden_size
        self.enorm, self.hnorm = RMSNorm(hidden, config.rms_norm_eps), RMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = SharedHead(config, own_head)
        if own_embedding:
            self.embed_tokens = Linear(hidden, config.vocab_size)


class Decoder(nn.Module):
    """The layer under its checkpoint name, and the target's embedding unless the layer has its own."""

    def __init__(self, number: str, layer: NextNLayer, config: DeepseekV32Config, own_embedding: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({number: layer})
        if not own_embedding:
            self.embed_tokens = Linear(config.hidden_size, config.vocab_size)


class NextNChain(mtp.Chain):
    """The draft network; all its memory is paged, so `depth` sizes nothing. Embedding and head are the target's, except
    those of the names in `own`."""

    frequencies: Tensor

    def __init__(self, config: DeepseekV32Config, depth: int, max_seq_len: int, own: frozenset[str]) -> None:
        super().__init__()
        self.config, self.vocab_size, self.width = config, config.vocab_size, config.hidden_size
        prefix, self.number = draft_prefix(config), str(config.num_hidden_layers)
        own_embedding = f"{prefix}embed_tokens.weight" in own
        own_head = f"{prefix}shared_head.head.weight" in own
        layer = NextNLayer(config, max_seq_len, own_embedding, own_head)
        self.model = Decoder(self.number, layer, config, own_embedding)
        if not own_head:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.layer_state = layer.self_attn.state("mtp.0")
        self.register_buffer("frequencies", frequencies_of(config))

    @property
    def layer(self) -> NextNLayer:
        """The one MTP layer."""
        return cast(NextNLayer, self.model.layers[self.number])

    def run(
        self, next_ids: Tensor, hidden: Tensor, rows: mtp.ChainRows, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """g [N, D] and the latent and index rows with those of this step."""
        layer = self.layer
        embedding = layer if hasattr(layer, "embed_tokens") else self.model
        token = layer.enorm(embedding.embed_tokens.rows(next_ids))
        joined = layer.eh_proj(torch.cat([token, layer.hnorm(hidden)], dim=1))
        flat = Flat.of(self.config, self.frequencies, rows.positions, rows.slots, rows.page_table)
        y, state = layer(joined, flat, state)
        return layer.shared_head.norm(y), state

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V]; the hidden is normed already."""
        own = self.layer.shared_head
        head = own.head if hasattr(own, "head") else self.lm_head
        out: Tensor = head(hidden)
        return out


class Observe(mtp.Observe, NextNChain):
    """Draft-extend over this layer."""


class Next(mtp.Next, NextNChain):
    """One row more of this layer."""


class Pick(mtp.Pick, NextNChain):
    """A token from the hidden this layer left."""


STEPS = (Observe, Next, Pick)
