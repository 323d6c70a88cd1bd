"""The V3.2 oracle: it is the eager target step, its MTP chains are those of the book, and every weight is in use."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.demo import checkpoint, mtp_training
from twostroke.builder.demo.generate import continuations
from twostroke.builder.demo.models import DemoModel, v32_mtp
from twostroke.builder.demo.shape import is_trained
from twostroke.builder.demo.target_training import language_loss
from twostroke.builder.demo.tokenizer import train_tokenizer
from twostroke.builder.demo.whole_sequence_v32 import MtpChain, mtp, target
from twostroke.builder.networks.registry import TARGETS
from twostroke.tests.builder.flat_runs import Memory, Toy, assert_close, feed
from twostroke.tests.checkpoints import T32, write_checkpoint

LENGTH = 60


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return v32_mtp(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        index_head_dim=16,
        index_topk=8,
    )


@pytest.fixture(scope="module")
def weights(model: DemoModel) -> dict[str, Tensor]:
    return model.initial(model.config, 0)


@pytest.fixture(scope="module")
def tokens(model: DemoModel) -> Tensor:
    return torch.randint(3, 300, (1, LENGTH), generator=torch.Generator().manual_seed(1))


# Many index heads: with few, some scores are exactly zero (every ReLU is shut) and ties are settled by rounding.
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 0},
        {"rope_scaling": None, "n_group": 1, "indexer_rope_interleave": True},
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
            "kv_lora_rank": 28,
            "index_head_dim": 24,
            "rope_scaling": {**T32["rope_scaling"], "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ],
    ids=["toy", "many-groups", "unscaled-rope", "odd-widths"],
)
def test_the_plain_form_equals_the_absorbed_step_below_and_beyond_top_k(
    overrides: dict[str, object], tmp_path: Path
) -> None:
    toy = Toy(write_checkpoint(tmp_path, T32, seed=7, index_n_heads=16, **overrides))
    tokens = torch.randint(2, 319, (1, 90), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = target(toy.raw, toy.weights, tokens).logits[0].numpy()
    step = toy.target(max_seq_len=96)
    found = feed(step, Memory(step.spec.state, pages_per_slot=2), 1, tokens[0].tolist(), [90])["logits"]
    assert_close(found, expected, 1e-5)


def test_top_k_leaves_something_out(model: DemoModel, weights: dict[str, Tensor], tokens: Tensor) -> None:
    sparse = model.target(weights, tokens).logits
    dense = model.target(weights, tokens, config=model.warm_up_config).logits
    torch.testing.assert_close(sparse[:, :8], dense[:, :8], atol=1e-5, rtol=1e-5)
    assert (sparse[:, 20:] - dense[:, 20:]).abs().max() > 1e-3


def test_a_token_changes_no_earlier_logits(model: DemoModel, weights: dict[str, Tensor], tokens: Tensor) -> None:
    other = tokens.clone()
    other[:, 30] = 5 if other[0, 30] != 5 else 6
    before, after = (model.target(weights, given).logits for given in (tokens, other))
    torch.testing.assert_close(before[:, :30], after[:, :30], atol=1e-6, rtol=0)
    assert not torch.equal(before[:, 30], after[:, 30])


def test_continuing_a_sequence_equals_reading_it_whole(
    model: DemoModel, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    whole = target(model.config, weights, tokens)
    first = target(model.config, weights, tokens[:, :41])
    rest = target(model.config, weights, tokens[:, 41:], earlier=first.inputs)
    torch.testing.assert_close(rest.logits, whole.logits[:, 41:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rest.hidden, whole.hidden[:, 41:], atol=1e-5, rtol=1e-5)
    text = continuations(model, weights, tokens[:, :20], 6)
    for place in range(20, 26):
        assert text[0, place] == model.target(weights, text[:, :place]).logits[0, -1].argmax()


@pytest.mark.parametrize("last", [3, 20, 45])
def test_chains_from_every_row_at_once_are_the_chains_of_the_book(
    model: DemoModel, weights: dict[str, Tensor], tokens: Tensor, last: int
) -> None:
    """The book: a drafted token joins the hidden row before it, behind the rows of the target, and all is run again."""
    config = model.config
    hidden = target(config, weights, tokens).hidden[:, :-1]
    chain, given = MtpChain(config, weights, hidden), tokens[:, 1:]
    rows, paired = hidden[:, : last + 1], tokens[:, 1 : last + 2]
    for _ in range(3):
        together = chain.step(given)
        alone = mtp(config, weights, rows, paired)
        torch.testing.assert_close(together.logits[:, last], alone.logits[:, -1], atol=1e-5, rtol=1e-5)
        given = together.logits.argmax(-1)
        rows = torch.cat((rows, alone.hidden[:, -1:]), 1)
        paired = torch.cat((paired, alone.logits[:, -1:].argmax(-1)), 1)


def test_accepted_drafts_are_those_that_match_the_text_up_to_the_first_miss(
    model: DemoModel, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    """A text that follows the chain of its anchor is accepted whole; one wrong token ends it there."""
    config, anchor = model.config, 30
    text = tokens[:, : anchor + 5].clone()
    chain = MtpChain(config, weights, target(config, weights, text[:, :anchor]).hidden)
    given = text[:, 1 : anchor + 1]
    for depth in range(3):
        given = chain.step(given).logits.argmax(-1)
        text[0, anchor + 1 + depth] = given[0, -1]
    assert mtp_training.accepted_lengths(config, weights, text, anchor).tolist()[0] == 3
    for depth in range(3):
        wrong = text.clone()
        wrong[0, anchor + 1 + depth] = (wrong[0, anchor + 1 + depth] + 1) % 300
        assert mtp_training.accepted_lengths(config, weights, wrong, anchor).tolist()[0] == depth


def test_every_trained_weight_receives_a_gradient(model: DemoModel, weights: dict[str, Tensor], tokens: Tensor) -> None:
    leaves = {name: tensor.clone().requires_grad_(is_trained(name)) for name, tensor in weights.items()}
    text = torch.cat((tokens, tokens.flip(1), tokens.roll(7, 1)))
    total, following, loads = language_loss(model, leaves, text, dropout=0.0)
    drafted, agree, drafted_loads = model.draft_loss(model.config, leaves, text, 10, 0)
    (total + drafted).backward()
    silent = [name for name, t in leaves.items() if t.requires_grad and (t.grad is None or not t.grad.abs().sum() > 0)]
    assert silent == []
    assert following > 0
    assert agree.shape == (3,)
    assert len(loads) == 2
    assert len(drafted_loads) == 1
    for load in (*loads.values(), *drafted_loads.values()):
        assert load.sum() == pytest.approx(model.config.num_experts_per_tok)
    assert all(name in weights and not is_trained(name) for name in loads | drafted_loads)


def test_the_draft_loss_changes_nothing_but_the_mtp_layer(
    model: DemoModel, weights: dict[str, Tensor], tokens: Tensor
) -> None:
    leaves = {name: tensor.clone().requires_grad_(model.is_draft(name)) for name, tensor in weights.items()}
    model.draft_loss(model.config, leaves, tokens, 10, 0)[0].backward()
    assert {name for name, tensor in leaves.items() if tensor.grad is not None} == {
        name for name in weights if model.is_draft(name) and is_trained(name)
    }


def test_a_saved_folder_is_a_checkpoint_with_every_tensor_of_the_inventory(
    model: DemoModel, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(["x = 1\n" * 50], 300)
    checkpoint.save(tmp_path, model.raw, model.shards(weights), tokenizer)
    found = Checkpoint.open(tmp_path)
    found.check(TARGETS["deepseek_v32"].all_tensors(found.config))
    shared = {spec.name for spec in TARGETS["deepseek_v32"].all_tensors(found.config) if spec.copy_of is not None}
    assert len(shared) == 2
    assert not shared & found.entries.keys(), "a copy of the target's tensor would be shipped twice"
    assert found.entries[f"{model.draft_prefix}mlp.gate.e_score_correction_bias"].dtype == "F32"
