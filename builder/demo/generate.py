"""Continuations by the target itself, many sequences in step, and the iterations that drafting makes of them."""

import torch
from torch import Tensor

from twostroke.builder.demo.models import DemoModel
from twostroke.builder.demo.whole_sequence import Weights


@torch.no_grad()
def continuations(
    model: DemoModel,
    weights: Weights,
    prompts: Tensor,
    count: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Prompts [B, L] of one length -> [B, L + count]; greedy at temperature 0."""
    tokens = [prompts]
    output = model.target(weights, prompts)
    for step in range(count):
        logits = output.logits[:, -1]
        if temperature:
            probabilities = (logits / temperature).softmax(-1)
            following = torch.multinomial(probabilities, 1, generator=generator)
        else:
            following = logits.argmax(-1, keepdim=True)
        tokens.append(following)
        if step < count - 1:
            output = model.target(weights, following, earlier=output.inputs)
    return torch.cat(tokens, 1)


def chain(accepted: list[int], tokens_wanted: int) -> list[int]:
    """Tokens emitted by each iteration of a run of `tokens_wanted` tokens.

    `accepted[i]` is the accepted draft length with the i-th generated token as anchor. Prefill emits the first token;
    every iteration emits its accepted drafts and the bonus; what passes the end is not counted.
    """
    emitted: list[int] = []
    place = 0
    while place < tokens_wanted - 1:
        step = min(accepted[place] + 1, tokens_wanted - 1 - place)
        emitted.append(step)
        place += step
    return emitted
