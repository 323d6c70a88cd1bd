"""The MTP layer's loss, unrolled as far as it drafts, and how many of its drafts a greedy target accepts."""

import math

import torch
from torch import Tensor

from twostroke.builder.demo.shape import EOS
from twostroke.builder.demo.trace import Trace
from twostroke.builder.demo.whole_sequence import Config, Weights
from twostroke.builder.demo.whole_sequence_v32 import MtpChain, target

DEPTH = 3  # tokens drafted an iteration, though the layer is one
CORPUS_WEIGHT = 0.3  # of places in the prompt, which people wrote, beside those in what the target wrote
INDEXER_WEIGHT = 0.1


def draft_loss(
    config: Config, weights: Weights, tokens: Tensor, first: int, anchors: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Tokens [B, L], of which those before `first` are the prompt -> loss, agreement of greedy picks by depth in the
    target's own words, expert loads. A chain starts at every position, whatever `anchors` says.

    Depth k: 0.5 cross-entropy to the token + 0.9 L1 to the target's distribution, weighted exp(-(k-1)/DEPTH). Chains
    take the text's tokens and end where the text does.
    """
    with torch.no_grad():
        told = target(config, weights, tokens)
        ended = (tokens == EOS).long().cumsum(1)
    rows = tokens.shape[1] - DEPTH - 1
    trace = Trace()
    chain = MtpChain(config, weights, told.hidden[:, :rows], trace)
    loss = total = torch.zeros((), device=tokens.device)
    agreed = []
    for depth in range(DEPTH):
        given, predicted = depth + 1, depth + 2  # of row i: token i + given goes in, token i + predicted is wanted
        log_p = chain.step(tokens[:, given : given + rows]).logits.log_softmax(-1)
        p_target = told.logits[:, given : given + rows].softmax(-1)
        place = torch.arange(given, given + rows, device=tokens.device)
        alive = (ended[:, given : given + rows] == 0).float()
        written = (place >= first).float()
        weight = (CORPUS_WEIGHT + (1 - CORPUS_WEIGHT) * written) * alive * math.exp(-depth / DEPTH)
        entropy = -log_p.gather(-1, tokens[:, predicted : predicted + rows, None])[..., 0]
        distance = (log_p.exp() - p_target).abs().sum(-1)
        loss = loss + ((0.5 * entropy + 0.9 * distance) * weight).sum()
        total = total + weight.sum()
        own = alive * written
        same = (log_p.argmax(-1) == p_target.argmax(-1)).float() * own
        agreed.append(same.sum() / own.sum().clamp(min=1))
    return loss / total + INDEXER_WEIGHT * trace.indexer_loss(), torch.stack(agreed), trace.loads()


@torch.no_grad()
def accepted_lengths(config: Config, weights: Weights, tokens: Tensor, first: int) -> Tensor:
    """Greedy text [1, L] -> accepted drafts at every anchor position first..L-1-DEPTH, [L - DEPTH - first]. The chain
    of anchor p starts from the hidden row of position p - 1."""
    chain = MtpChain(config, weights, target(config, weights, tokens).hidden[:, :-1])
    given, drafted = tokens[:, 1:], []
    for _ in range(DEPTH):
        given = chain.step(given).logits.argmax(-1)
        drafted.append(given[0])
    anchors = torch.arange(first, tokens.shape[1] - DEPTH, device=tokens.device)
    truth = tokens[0][anchors[:, None] + 1 + torch.arange(DEPTH, device=tokens.device)]
    return (torch.stack(drafted, -1)[anchors - 1] == truth).long().cumprod(-1).sum(-1)
