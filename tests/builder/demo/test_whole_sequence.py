"""The oracle's own promises: causal target, two-way draft block, every weight in use."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from twostroke.builder.demo.dspark_training import draft_loss
from twostroke.builder.demo.generate import continuations
from twostroke.builder.demo.models import DemoModel, v4_dspark
from twostroke.builder.demo.shape import is_trained
from twostroke.builder.demo.target_training import language_loss
from twostroke.builder.demo.whole_sequence import draft, greedy_draft, markov_bias, target, top_rows

LENGTH = 150


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return v4_dspark(
        vocab_size=64,
        hidden_size=32,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_lora_rank=8,
        index_head_dim=16,
        index_topk=4,
        sliding_window=16,
        moe_intermediate_size=8,
        dspark_markov_rank=4,
    )


@pytest.fixture(scope="module")
def config(model: DemoModel) -> SimpleNamespace:
    return model.config


@pytest.fixture(scope="module")
def weights(model: DemoModel) -> dict[str, Tensor]:
    return model.initial(model.config, 0)


@pytest.fixture(scope="module")
def tokens(config: SimpleNamespace) -> Tensor:
    return torch.randint(3, config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def _changed(tokens: Tensor, place: int) -> Tensor:
    other = tokens.clone()
    other[:, place] = (other[:, place] - 3 + 1) % 61 + 3
    return other


@pytest.mark.parametrize("place", [3, 4, 127, 128, 140])
def test_a_token_changes_no_earlier_logits_and_its_own(
    config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor, place: int
) -> None:
    before = target(config, weights, tokens).logits
    after = target(config, weights, _changed(tokens, place)).logits
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place], after[:, place])


def test_a_token_beyond_the_window_is_still_felt_through_compressed_rows(
    config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    before, after = (target(config, weights, t).logits for t in (tokens, _changed(tokens, 0)))
    assert not torch.equal(before[:, -1], after[:, -1])


def test_continuing_a_sequence_equals_reading_it_whole(
    config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    whole = target(config, weights, tokens)
    first = target(config, weights, tokens[:, :126])
    rest = target(config, weights, tokens[:, 126:], earlier=first.inputs)
    torch.testing.assert_close(rest.logits, whole.logits[:, 126:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rest.taps, whole.taps[:, 126:], atol=1e-5, rtol=1e-5)


def test_greedy_continuation_picks_the_likeliest_token_each_time(
    model: DemoModel, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    text = continuations(model, weights, tokens[:, :20], 6)
    for place in range(20, 26):
        assert text[0, place] == model.target(weights, text[:, :place]).logits[0, -1].argmax()


def test_ties_of_the_indexer_go_to_the_lowest_row() -> None:
    scores = torch.tensor([[[0.0, 1.0, 0.0, 0.0, 2.0]]])
    visible = torch.tensor([[[True, True, True, True, False]]])
    assert top_rows(scores, visible, 2).tolist() == [[[True, True, False, False, False]]]


def test_first_draft_row_sees_the_last_one_and_no_context_outside_the_window(
    config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    taps = target(config, weights, tokens).taps
    at = torch.tensor([[40]])
    anchors = tokens[:, 40:41]
    noisy = weights | {"embed.weight": weights["embed.weight"].clone()}
    noisy["embed.weight"][config.dspark_noise_token_id] += 1
    first = draft(config, weights, taps, anchors, at).hidden[:, :, 0]
    assert not torch.equal(first, draft(config, noisy, taps, anchors, at).hidden[:, :, 0])

    for place, felt in ((23, False), (24, True), (39, True), (40, False)):
        other = taps.clone()
        other[:, place] += 1
        changed = not torch.equal(first, draft(config, weights, other, anchors, at).hidden[:, :, 0])
        assert changed == felt, place


def test_anchors_of_one_call_do_not_see_each_other(
    config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    taps = target(config, weights, tokens).taps
    at = torch.tensor([[0, 40, 42]])
    together = draft(config, weights, taps, tokens[:, [0, 40, 42]], at)
    alone = draft(config, weights, taps, tokens[:, [40]], at[:, 1:2])
    torch.testing.assert_close(together.logits[:, 1:2], alone.logits, atol=1e-5, rtol=1e-5)


def test_markov_bias_counts_at_the_first_position_too(
    config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    output = draft(config, weights, target(config, weights, tokens).taps, tokens[:, [40]], torch.tensor([[40]]))
    drafted, survives = greedy_draft(config, weights, output, tokens[:, [40]])
    first = output.logits[..., 0, :] + markov_bias(config, weights, tokens[:, [40]])
    assert torch.equal(drafted[..., 0], first.argmax(-1))
    assert drafted.shape == survives.shape == (1, 1, config.dspark_block_size)


def test_every_trained_weight_receives_a_gradient(model: DemoModel, weights: dict[str, Tensor], tokens: Tensor) -> None:
    config = model.config
    leaves = {
        name: tensor.clone().requires_grad_(tensor.is_floating_point() and is_trained(name))
        for name, tensor in weights.items()
    }
    text = torch.cat((tokens, tokens.flip(1), tokens.roll(7, 1)))
    total, following, loads = language_loss(model, leaves, text, dropout=0.0)
    anchors = torch.arange(5, 140, 5).expand(3, -1)  # many rows: every expert is chosen somewhere
    drafted = draft_loss(config, leaves, text, anchors)[0]
    (total + drafted).backward()
    silent = [name for name, t in leaves.items() if t.requires_grad and (t.grad is None or not t.grad.abs().sum() > 0)]
    assert silent == []
    assert following > 0
    assert all(load.sum() == pytest.approx(config.num_experts_per_tok) for load in loads.values())
    assert any(model.is_draft(name) for name in leaves)
