"""MTP draft of DeepSeek-V4 Preview: one NextN block, used again for every token of a chain.

    row at position i:  X_in[j] = e_proj(enorm(embed(t_{i+1}))) + h_proj(hnorm(H_i[j]))        for each stream j
                        X_out   = block(X_in, i)          window attention over the rows of positions i-window+1 .. i
                        logits  = head(norm(hc_head(X_out)))                                   they predict t_{i+2}

    observe:  rows of all committed tokens, H_i = the target's streams after its last layer, before its hc_head
    pick:     logits and x_k from the hidden of a slot
    next:     one row more, for the token picked, H_i = X_out of the row before

`hidden` holds one row a slot, X_out of the row that was computed last: `observe` leaves that of the last committed
token, `next` replaces it while a block is drafted, and the `observe` that follows every block restores it. G tokens are
pick, then (next, pick) G-1 times. The rows of `next` stand at positions P .. P+G-2 of the draft's own window ring,
which is long enough to keep every committed row the next token sees; `observe` overwrites those of accepted tokens
with rows made from the target's hidden.

Sources: `spec/dspark.md` section 12 (block and formula) and `spec/deepseek_v32.md` section 8 (pairing of hidden i with
token i+1, both at position i; draft row k sees all rows up to its own). Window frequencies, no YaRN.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from twostroke.builder.config import DeepseekV4Config
from twostroke.builder.networks.deepseek_v4 import HyperConnected, Rows, WindowAttention
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
from twostroke.engines.manifest import Binding, StateTensor
from twostroke.plugins.flat_step import scatter_rows, take
from twostroke.plugins.hyper_connection.torch_op import HC_HEAD

DEFAULT_DEPTH = 3
MAX_DEPTH = 16  # the block was trained for depth 1; each further token is accepted less often


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


class Mtp(nn.Module):
    """The draft network for chains of up to `depth` tokens. `embed` and `head` are the target's own."""

    frequencies: Tensor

    def __init__(self, config: DeepseekV4Config, depth: int) -> None:
        super().__init__()
        self.config, self.depth = config, depth
        self.embed = Linear(config.hidden_size, config.vocab_size)
        self.head = Linear(config.hidden_size, config.vocab_size)
        self.mtp = nn.ModuleList([NextN(config, depth)])
        self.register_buffer("frequencies", rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None))

    @property
    def block(self) -> NextN:
        """The one NextN block."""
        return cast(NextN, self.mtp[0])

    @property
    def width(self) -> int:
        """Features of a hidden row: the streams side by side, m*D."""
        return self.config.hc_mult * self.config.hidden_size

    @property
    def hidden_state(self) -> StateTensor:
        """One row a slot, of the last committed position: a ring of one."""
        return StateTensor("mtp.0.hidden", "ring", 1, 1, self.width, lookback=1)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The window ring and the kept hidden."""
        return (*self.block.attn.state("mtp.0"), self.hidden_state)

    def run(
        self, next_ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, row_start: Tensor, window: Tensor
    ) -> tuple[Tensor, Tensor]:
        """X_out [N, m*D] of the rows (hidden [N, m*D], next_ids [N]) at `positions`, and the window ring with them."""
        config, block = self.config, self.block
        turn = Rotation.at(positions, self.frequencies, config.head_dim)
        token = block.e_proj(block.enorm(self.embed.weight[next_ids]))
        past = block.h_proj(block.hnorm(hidden.reshape(-1, config.hc_mult, config.hidden_size)))
        streams, (window,) = block(
            token[:, None, :] + past, Rows(next_ids, positions, slots, row_start, turn), (window,)
        )
        return streams.reshape(streams.shape[0], -1), window

    def declare(self, name: str, *inputs: Binding) -> StepSpec:
        """A step that runs the block over N rows of several requests and writes both state tensors."""
        return StepSpec(
            name,
            self,
            (
                *inputs,
                step_input("positions", "N"),
                step_input("slots", "N"),
                step_input("row_start", "R1"),
            ),
            (),
            self.state,
            tuple(tensor.name for tensor in self.state),
            sizes={"N": 12, "R1": 4, "S": 5},
        )


class Observe(Mtp):
    """Draft-extend: the rows of everything the target committed, and the hidden a proposal starts from."""

    def forward(
        self,
        taps: Tensor,
        next_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        row_start: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """The window ring with this step's rows, and the hidden of each request's last committed one.

        taps [N, m*D]; next_ids [N] the token after each row's; rejected rows carry slot 0. A slot's rows are
        contiguous, so the last one is where the next row is another slot's.
        """
        window, hidden = state
        positions, slots = positions.long(), slots.long()
        out, window = self.run(next_ids.long(), taps, positions, slots, row_start.long(), window)
        following = torch.cat([slots, torch.full((1,), -1, dtype=torch.int64)])[1:]
        return window, scatter_rows(hidden, torch.where(slots != following, slots, 0), out)

    def step(self) -> StepSpec:
        """The declaration of the observe step."""
        return self.declare(
            "observe", step_input("taps", "N", self.width, dtype="float32"), step_input("next_ids", "N")
        )


class Next(Mtp):
    """One row more for every request of a proposal, from the token picked last and the hidden it was picked from."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        row_start: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """The window ring and the hidden after the row. token_ids, positions, slots [N], one row a request."""
        window, hidden = state
        slots = slots.long()
        before = take(hidden, slots)
        out, window = self.run(token_ids.long(), before, positions.long(), slots, row_start.long(), window)
        return window, scatter_rows(hidden, slots, out)

    def step(self) -> StepSpec:
        """The declaration of the next step."""
        return self.declare("next", step_input("token_ids", "N"))


class Pick(Mtp):
    """A token from the hidden of each slot."""

    def forward(
        self, slots: Tensor, inverse_temperature: Tensor, noise: Tensor, *state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [N] (i32), logits [N, V], confidence [N].

        x = argmax(logits * inverse_temperature + noise), the lowest id among equals, as `markov_head` picks.
        confidence = softmax(logits * inverse_temperature)[x], how sure the draft itself is of its pick.
        """
        config, block = self.config, self.block
        (hidden,) = state
        streams = take(hidden, slots.long()).reshape(-1, config.hc_mult, config.hidden_size)
        collapsed = HC_HEAD.overload(
            streams, block.hc_head_fn, block.hc_head_base, block.hc_head_scale, config.hc_eps, config.rms_norm_eps
        )
        logits = self.head(block.norm(collapsed))
        scaled = logits * inverse_temperature[:, None]
        tokens = torch.argmax(scaled + noise, dim=1)
        confidence = torch.softmax(scaled, dim=1).gather(1, tokens[:, None])[:, 0]
        return tokens.to(torch.int32), logits, confidence

    def step(self) -> StepSpec:
        """The declaration of the pick step."""
        vocab = self.config.vocab_size
        return StepSpec(
            "pick",
            self,
            (
                step_input("slots", "N"),
                step_input("inverse_temperature", "N", dtype="float32"),
                step_input("noise", "N", vocab, dtype="float32"),
            ),
            (
                step_output("tokens", "N", dtype="int32"),
                step_output("logits", "N", vocab),
                step_output("confidence", "N"),
            ),
            (self.hidden_state,),
            (),
            sizes={"N": 3, "S": 5},
        )
