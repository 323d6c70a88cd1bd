"""DSpark draft of DeepSeek-V4 (0731): a parallel block of G hidden rows, then a sequential head that picks G tokens.

    observe:  m_p = main_norm(main_proj z_p);  stage s keeps  rope(kv_norm_s(wkv_s m_p))  at position p
    propose:  rows [anchor, noise x (G-1)] at positions P .. P+G-1 pass three V4 layers whose attention sees the
              context rows of positions P-window .. P-1 and the whole block, both directions;
              h = hc_head(X),  U = head(norm(h));  the markov head picks x_1 .. x_G and says how sure it is

z_p is the mean over streams of the outputs of the target layers `dspark_target_layer_ids`, concatenated. Source:
DSpark (arXiv 2607.05147) and the publisher's reference for V4-Flash-0731. Draft layers use window frequencies, no
YaRN. The context is written for committed tokens only, so it never needs undoing; the block's own rows are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from twostroke.builder.config import DSPARK_BLOCKS, DeepseekV4Config, DSparkConfig, ModelConfig
from twostroke.builder.networks.deepseek_v4 import HyperConnected, Projections
from twostroke.builder.networks.draft_heads import MARKOV_HEADS, ConfidenceHead
from twostroke.builder.networks.layers import (
    Linear,
    RMSNorm,
    Rotation,
    StepSpec,
    rope_frequencies,
    step_input,
    step_output,
    weight,
)
from twostroke.engines.errors import BuildError
from twostroke.engines.manifest import StateTensor
from twostroke.plugins.flat_step import ring_targets, scatter_rows, take
from twostroke.plugins.hyper_connection.torch_op import HC_HEAD
from twostroke.plugins.nsa.torch_op import NSA_BLOCK


def with_forced_block(config: ModelConfig, method: str, block_size: int | None) -> tuple[DeepseekV4Config, int | None]:
    """The config with blocks of `block_size` tokens, and the size it was trained for where that is another.

    Attention in a block is bidirectional: more or fewer rows change what every row proposes, so this is never done
    unasked. The target's answers do not depend on it.
    """
    if method != "dspark" or not isinstance(config, DeepseekV4Config) or config.dspark is None:
        raise BuildError(f"--force-draft-len is for dspark, which has a trained block; the draft method is {method}")
    trained, (lowest, highest) = config.dspark.block_size, DSPARK_BLOCKS
    if block_size is None or not lowest <= block_size <= highest:
        given = "is missing" if block_size is None else f"is {block_size}"
        raise BuildError(
            f"--force-draft-len needs --max-draft-len, which {given}; accepted: {lowest} to {highest}, "
            f"trained: {trained}"
        )
    forced = replace(config, dspark=replace(config.dspark, block_size=block_size))
    return forced, None if block_size == trained else trained


@dataclass(frozen=True)
class Block:
    """What every stage of a proposal reads. Tensors [R] per request, `turn` per block row [R*G]."""

    token_ids: Tensor
    position: Tensor
    slot: Tensor
    valid_from: Tensor
    turn: Rotation


class BlockAttention(Projections):
    """Attention of a block row over its request's context and the whole block."""

    def __init__(self, config: DeepseekV4Config, gamma: int) -> None:
        super().__init__(config)
        self.ring = config.sliding_window + gamma

    def forward(self, x: Tensor, block: Block, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = NSA_BLOCK.overload(
            self.queries(self.latent(x), block.turn),
            self.key_rows(x, block.turn),
            self.attn_sink,
            state[0],
            block.position,
            block.slot,
            block.valid_from,
            self.config.sliding_window,
            self.ring,
            self.scale,
        )
        return self.output(out, block.turn), state


class Stage(HyperConnected):
    """One draft layer. As in the checkpoint, the first also holds the context projection and the last the heads."""

    attn: BlockAttention

    def __init__(self, config: DeepseekV4Config, dspark: DSparkConfig, first: bool, last: bool) -> None:
        super().__init__(config, BlockAttention(config, dspark.block_size), hashed=False)
        hidden, streams = config.hidden_size, config.hc_mult
        if first:
            self.main_proj = Linear(len(dspark.target_layer_ids) * hidden, hidden)
            self.main_norm = RMSNorm(hidden, config.rms_norm_eps)
        if last:
            self.norm = RMSNorm(hidden, config.rms_norm_eps)
            self.hc_head_fn, self.hc_head_base = weight(streams, streams * hidden), weight(streams)
            self.hc_head_scale = weight(1)
            rank = dspark.markov_rank
            self.markov_head = MARKOV_HEADS[dspark.markov_head_type](config.vocab_size, rank, hidden)
            width = hidden + (rank if dspark.confidence_head_with_markov else 0)
            self.confidence_head = ConfidenceHead(width) if dspark.enable_confidence_head else None


class DSpark(nn.Module):
    """The draft network. `embed` and `head` are the target's own."""

    frequencies: Tensor

    def __init__(self, config: DeepseekV4Config, dspark: DSparkConfig) -> None:
        super().__init__()
        self.config, self.dspark = config, dspark
        stages = len(dspark.target_layer_ids)
        self.embed = Linear(config.hidden_size, config.vocab_size)
        self.head = Linear(config.hidden_size, config.vocab_size)
        self.mtp = nn.ModuleList(Stage(config, dspark, first=s == 0, last=s == stages - 1) for s in range(stages))
        self.register_buffer("frequencies", rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The draft layers in order."""
        return tuple(cast(Stage, stage) for stage in self.mtp)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The context ring of every stage; a proposal at P reads positions P-window .. P-1."""
        window = self.config.sliding_window
        ring = window + self.dspark.block_size
        return tuple(
            StateTensor(f"mtp.{s}.context", "ring", 1, ring, self.config.head_dim, lookback=window)
            for s in range(len(self.mtp))
        )


class Observe(DSpark):
    """Absorbs what the target committed: one context row a stage for every committed row of the step."""

    def forward(
        self,
        taps: Tensor,
        next_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        row_start: Tensor,
        *context: Tensor,
    ) -> tuple[Tensor, ...]:
        """The context rings with this step's rows. taps [N, W]; `next_ids` [N] is for methods that embed it."""
        positions, slots, row_start = positions.long(), slots.long(), row_start.long()
        turn = Rotation.at(positions, self.frequencies, self.config.head_dim)
        first = self.stages[0]
        features = first.main_norm(first.main_proj(taps))
        after = []
        for stage, rows in zip(self.stages, context, strict=True):
            targets = ring_targets(positions, slots, row_start, ring=stage.attn.ring)
            after.append(scatter_rows(rows, targets, stage.attn.key_rows(features, turn)))
        return tuple(after)

    def step(self) -> StepSpec:
        """The declaration of the observe step."""
        width = len(self.dspark.target_layer_ids) * self.config.hidden_size
        return StepSpec(
            "observe",
            self,
            (
                step_input("taps", "N", width, dtype="float32"),
                step_input("next_ids", "N"),
                step_input("positions", "N"),
                step_input("slots", "N"),
                step_input("row_start", "R1"),
            ),
            (),
            self.state,
            tuple(tensor.name for tensor in self.state),
            sizes={"N": 12, "R1": 4, "S": 5},
        )


class Propose(DSpark):
    """Drafts G tokens a request from its anchor."""

    def forward(
        self,
        anchor: Tensor,
        position: Tensor,
        slot: Tensor,
        valid_from: Tensor,
        inverse_temperature: Tensor,
        noise: Tensor,
        *context: Tensor,
    ) -> tuple[Tensor, ...]:
        """tokens [R, G] (i32), logits [R, G, V], and confidence [R, G] where the draft has that head; context is read,
        never written."""
        config, gamma, requests = self.config, self.dspark.block_size, anchor.shape[0]
        anchor, position, slot = anchor.long(), position.long(), slot.long()
        filler = torch.full((requests, gamma - 1), self.dspark.noise_token_id, dtype=torch.int64)
        ids = torch.cat([anchor[:, None], filler], dim=1).reshape(-1)
        positions = (position[:, None] + torch.arange(gamma)).reshape(-1)
        block = Block(
            ids, position, slot, valid_from.long(), Rotation.at(positions, self.frequencies, self.config.head_dim)
        )
        streams = self.embed.weight[ids][:, None, :].expand(-1, config.hc_mult, -1).contiguous()
        for stage, rows in zip(self.stages, context, strict=True):
            streams, _ = stage(streams, block, (rows,))
        last = self.stages[-1]
        hidden = HC_HEAD.overload(
            streams, last.hc_head_fn, last.hc_head_base, last.hc_head_scale, config.hc_eps, config.rms_norm_eps
        )
        base = self.head(last.norm(hidden)).reshape(requests, gamma, -1)
        hidden = hidden.reshape(requests, gamma, -1)  # before the norm: what V4's heads read
        tokens, logits = last.markov_head(base, hidden, anchor, inverse_temperature, noise)
        if last.confidence_head is None:
            return tokens, logits
        embedded = None
        if self.dspark.confidence_head_with_markov:
            previous = torch.cat([anchor[:, None], tokens[:, :-1].long()], dim=1)
            embedded = take(last.markov_head.markov_w1.weight, previous)
        return tokens, logits, last.confidence_head(hidden, embedded)

    def step(self) -> StepSpec:
        """The declaration of the propose step."""
        gamma, vocab = self.dspark.block_size, self.config.vocab_size
        confidence = (step_output("confidence", "R", gamma),) if self.dspark.enable_confidence_head else ()
        return StepSpec(
            "propose",
            self,
            (
                step_input("anchor", "R"),
                step_input("position", "R"),
                step_input("slot", "R"),
                step_input("valid_from", "S"),
                step_input("inverse_temperature", "R", dtype="float32"),
                step_input("noise", "R", gamma, vocab, dtype="float32"),
            ),
            (
                step_output("tokens", "R", gamma, dtype="int32"),
                step_output("logits", "R", gamma, vocab),
                *confidence,
            ),
            self.state,
            (),
            sizes={"R": 3, "S": 5},
        )
