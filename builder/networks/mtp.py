"""MTP drafting: one NextN layer behind the target, used again for every token of a chain.

    row at position i:  y_i = layer(embed(t_{i+1}) joined with H_i, i)      over the layer's own memory of rows 0 .. i
                        logits = what the family's head makes of y_i; they predict t_{i+2}

    observe:  rows of all committed tokens, H_i being what the target's taps say
    pick:     logits and x_k from the hidden of a slot
    next:     one row more, for the token picked, H_i being the recycled hidden of the row before

A family gives the layer (`Chain`); the steps around it are the same for all. `hidden` holds one row a slot, the
recycled hidden of the row that was computed last: `observe` leaves that of the last committed token, `next` replaces it
while a block is drafted, and the `observe` that follows every block restores it. G tokens are pick, then (next, pick)
G-1 times. The rows of `next` stand at positions P .. P+G-2 of the layer's memory, where no committed token is yet;
`observe` overwrites those of accepted tokens with rows made from the target's hidden.

Source: `spec/deepseek_v32.md` section 8 (pairing of hidden i with token i+1, both at position i; a draft row sees all
rows up to its own).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twostroke.builder.networks.layers import StepSpec, step_input, step_output
from twostroke.engines.manifest import Binding, StateTensor
from twostroke.plugins.flat_step import scatter_rows, take

DEFAULT_DEPTH = 3
MAX_DEPTH = 16  # the layer was trained for depth 1; each further token is accepted less often


@dataclass(frozen=True)
class ChainRows:
    """Where the rows of a draft step belong, i64: positions, slots [N], row_start [R+1], page_table [S, P]."""

    positions: Tensor
    slots: Tensor
    row_start: Tensor
    page_table: Tensor


class Chain(nn.Module):
    """The layer of a family and what joins it to its target. Parameters carry the checkpoint's names.

    `width`: features of a hidden row, W; `layer_state`: the layer's own memory.
    """

    width: int
    vocab_size: int
    layer_state: tuple[StateTensor, ...]

    def run(
        self, next_ids: Tensor, hidden: Tensor, rows: ChainRows, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The recycled hidden [N, W] of rows made of `next_ids` [N] and `hidden` [N, W], and the layer's memory with
        them."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] from recycled hiddens [N, W]."""
        raise NotImplementedError

    @property
    def hidden_state(self) -> StateTensor:
        """One row a slot, of the last committed position: a ring of one."""
        return StateTensor("mtp.0.hidden", "ring", 1, 1, self.width, lookback=1)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The layer's memory and the kept hidden."""
        return (*self.layer_state, self.hidden_state)

    def declare(self, name: str, *inputs: Binding) -> StepSpec:
        """A step that runs the layer over N rows of several requests and writes all of the state."""
        return StepSpec(
            name,
            self,
            (
                *inputs,
                step_input("positions", "N"),
                step_input("slots", "N"),
                step_input("row_start", "R1"),
                step_input("page_table", "S", "P"),
            ),
            (),
            self.state,
            tuple(tensor.name for tensor in self.state),
            sizes={"N": 12, "R1": 4, "S": 5, "P": 2, "pages": 6},
        )


class Observe(Chain):
    """Draft-extend: the rows of everything the target committed, and the hidden a proposal starts from."""

    def forward(
        self,
        taps: Tensor,
        next_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        row_start: Tensor,
        page_table: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """The layer's memory with this step's rows, and the hidden of each request's last committed one.

        taps [N, W]; next_ids [N] the token after each row's; rejected rows carry slot 0. A slot's rows are contiguous,
        so the last one is where the next row is another slot's.
        """
        *memory, hidden = state
        rows = ChainRows(positions.long(), slots.long(), row_start.long(), page_table.long())
        out, after = self.run(next_ids.long(), taps, rows, tuple(memory))
        following = torch.cat([rows.slots, torch.full((1,), -1, dtype=torch.int64)])[1:]
        return *after, scatter_rows(hidden, torch.where(rows.slots != following, rows.slots, 0), out)

    def step(self) -> StepSpec:
        """The declaration of the observe step."""
        taps = step_input("taps", "N", self.width, dtype="float32")
        return self.declare("observe", taps, step_input("next_ids", "N"))


class Next(Chain):
    """One row more for every request of a proposal, from the token picked last and the hidden it was picked from."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        row_start: Tensor,
        page_table: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """The layer's memory and the hidden after the row. token_ids, positions, slots [N], one row a request."""
        *memory, hidden = state
        rows = ChainRows(positions.long(), slots.long(), row_start.long(), page_table.long())
        out, after = self.run(token_ids.long(), take(hidden, rows.slots), rows, tuple(memory))
        return *after, scatter_rows(hidden, rows.slots, out)

    def step(self) -> StepSpec:
        """The declaration of the next step."""
        return self.declare("next", step_input("token_ids", "N"))


class Pick(Chain):
    """A token from the hidden of each slot."""

    def forward(
        self, slots: Tensor, inverse_temperature: Tensor, noise: Tensor, *state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [N] (i32), logits [N, V], confidence [N].

        x = argmax(logits * inverse_temperature + noise), the lowest id among equals, as `markov_head` picks.
        confidence = softmax(logits * inverse_temperature)[x], how sure the draft itself is of its pick.
        """
        (hidden,) = state
        logits = self.logits(take(hidden, slots.long()))
        scaled = logits * inverse_temperature[:, None]
        tokens = torch.argmax(scaled + noise, dim=1)
        confidence = torch.softmax(scaled, dim=1).gather(1, tokens[:, None])[:, 0]
        return tokens.to(torch.int32), logits, confidence

    def step(self) -> StepSpec:
        """The declaration of the pick step."""
        return StepSpec(
            "pick",
            self,
            (
                step_input("slots", "N"),
                step_input("inverse_temperature", "N", dtype="float32"),
                step_input("noise", "N", self.vocab_size, dtype="float32"),
            ),
            (
                step_output("tokens", "N", dtype="int32"),
                step_output("logits", "N", self.vocab_size),
                step_output("confidence", "N"),
            ),
            (self.hidden_state,),
            (),
            sizes={"N": 3, "S": 5},
        )
