"""The draft: learns the frozen target's next tokens and distributions on text the target wrote itself."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.builder.demo.generate import continuations
from twostroke.builder.demo.optimiser import Optimiser, balance_experts, captured
from twostroke.builder.demo.shape import EOS, is_draft, is_trained
from twostroke.builder.demo.token_stream import TokenStream
from twostroke.builder.demo.whole_sequence import Trace, confidence, draft, markov_bias, target


def own_text(
    config: SimpleNamespace,
    weights: dict[str, Tensor],
    stream: TokenStream,
    *,
    sequences: int,
    batch: int,
    prompt_length: int,
    count: int,
    astray: int,
) -> Tensor:
    """[sequences, prompt_length + count]: the target's greedy continuations of training prompts.

    In every second batch the first `astray` tokens are sampled: on training prompts the target partly recites, and what
    it writes away from its training text is closer to what it writes after a new prompt.
    """
    parts = []
    for number, begin in enumerate(range(0, sequences, batch)):
        tokens = stream.cuts(min(batch, sequences - begin), prompt_length, top_level_share=0.7)
        sampled = astray * (number % 2)
        if sampled:
            tokens = continuations(config, weights, tokens, sampled, temperature=1.0)
        parts.append(continuations(config, weights, tokens, count - sampled))
    return torch.cat(parts)


def draft_loss(
    config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Tokens [B, L], anchor positions [B, A] -> loss, agreement of greedy picks by position [G], expert loads.

    Per position k: 0.5 cross-entropy to the token + 0.9 L1 to the target's distribution, weighted exp(-(k-1)/G), and
    the confidence's cross-entropy to 1 - L1/2 (DS sections 2.2 and 8). Blocks end where the text does.
    """
    size = config.dspark_block_size
    with torch.no_grad():
        told = target(config, weights, tokens)
        places = positions[..., None] + torch.arange(size, device=tokens.device)  # [B, A, G], rows that predict
        pick = places.flatten(1)[..., None]
        p_target = told.logits.gather(1, pick.expand(-1, -1, config.vocab_size)).softmax(-1)
        p_target = p_target.unflatten(1, places.shape[1:])
        previous = tokens.gather(1, places.flatten(1)).view_as(places)
        following = tokens.gather(1, places.flatten(1) + 1).view_as(places)
        ended = (tokens == EOS).long().cumsum(1)
        alive = (ended.gather(1, places.flatten(1)).view_as(places) == 0).float()
        weight = torch.exp(-torch.arange(size, device=tokens.device) / size) * alive
    trace = Trace()
    output = draft(config, weights, told.taps, previous[..., 0], positions, trace)
    log_p = (output.logits + markov_bias(config, weights, previous)).log_softmax(-1)
    entropy = -log_p.gather(-1, following[..., None])[..., 0]
    distance = (log_p.exp() - p_target).abs().sum(-1)
    survives = confidence(config, weights, output.hidden, previous)
    sure = F.binary_cross_entropy_with_logits(survives, 1 - 0.5 * distance.detach(), reduction="none")
    loss = ((0.5 * entropy + 0.9 * distance + sure) * weight).sum() / weight.sum().clamp(min=1)
    agree = (log_p.argmax(-1) == p_target.argmax(-1)).float() * alive
    loads = {at: (route > 0).float().mean((0, 1)) for at, route in trace.routes}
    return loss, agree.sum((0, 1)) / alive.sum((0, 1)).clamp(min=1), loads


def train_draft(
    config: SimpleNamespace,
    weights: dict[str, Tensor],
    texts: Tensor,
    *,
    first_anchor: int,
    anchors: int,
    steps: int,
    batch: int,
    learning_rate: float,
    log: Callable[[str], None],
) -> None:
    for tensor in weights.values():
        tensor.requires_grad_(False)
    trained = {name: tensor for name, tensor in weights.items() if is_draft(name) and is_trained(name)}
    optimiser = Optimiser(trained, learning_rate, steps)
    last_anchor = texts.shape[1] - config.dspark_block_size - 1

    def step(tokens: Tensor) -> Tensor:
        chance = torch.rand(batch, last_anchor + 1 - first_anchor, device=tokens.device)
        positions = chance.argsort(-1)[:, :anchors] + first_anchor
        loss, agree, loads = draft_loss(config, weights, tokens, positions)
        optimiser.descend(loss)
        balance_experts(weights, loads)
        return torch.cat((loss.detach()[None], agree))

    def some() -> Tensor:
        return texts[torch.randint(len(texts), (batch,), device=texts.device)]

    optimiser.set_rate(0)
    run = captured(step, some())
    began, every = time.perf_counter(), max(1, steps // 10)
    seen = torch.zeros(1 + config.dspark_block_size, device=texts.device)
    for number in range(steps):
        optimiser.set_rate(number)
        seen += run(some())
        if (number + 1) % every == 0:
            loss, *agree = (seen / every).tolist()
            by_position = " ".join(f"{value:.3f}" for value in agree)
            seconds = time.perf_counter() - began
            log(f"draft {number + 1}/{steps} loss {loss:.4f} agreement {by_position} {seconds:.0f} s")
            seen.zero_()
