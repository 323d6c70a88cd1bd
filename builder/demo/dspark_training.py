"""DSpark's loss on the target's own text, and how many of its drafts a greedy target accepts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.builder.demo.shape import EOS
from twostroke.builder.demo.trace import Trace
from twostroke.builder.demo.whole_sequence import Config, Weights, confidence, draft, greedy_draft, markov_bias, target


def draft_loss(
    config: Config, weights: Weights, tokens: Tensor, positions: Tensor
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
    return loss, agree.sum((0, 1)) / alive.sum((0, 1)).clamp(min=1), trace.loads()


def loss_at_random_anchors(
    config: Config, weights: Weights, tokens: Tensor, first: int, anchors: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`draft_loss` at `anchors` places of each text that are at position `first` or later."""
    last = tokens.shape[1] - config.dspark_block_size - 1
    chance = torch.rand(tokens.shape[0], last + 1 - first, device=tokens.device)
    return draft_loss(config, weights, tokens, chance.argsort(-1)[:, :anchors] + first)


@torch.no_grad()
def accepted_lengths(config: Config, weights: Weights, tokens: Tensor, first: int) -> Tensor:
    """Greedy text [1, L] -> accepted drafts at every anchor position first..L-1-G, [L - G - first]."""
    size = config.dspark_block_size
    taps = target(config, weights, tokens).taps
    positions = torch.arange(first, tokens.shape[1] - size, device=tokens.device)
    anchors = tokens[0, positions]
    output = draft(config, weights, taps, anchors[None], positions[None])
    drafted = greedy_draft(config, weights, output, anchors[None])[0][0]  # [A, G]
    truth = tokens[0][positions[:, None] + 1 + torch.arange(size, device=tokens.device)]
    return (drafted == truth).long().cumprod(-1).sum(-1)
