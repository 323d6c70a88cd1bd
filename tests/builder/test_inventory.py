"""The tensors a config implies."""

from __future__ import annotations

from twostroke.builder.config import parse_config
from twostroke.builder.inventory import dspark_inventory, inventory, nextn_inventory, target_inventory
from twostroke.tests.checkpoints import F4, F4_PLAIN, F4_PREVIEW, FLASH_0731, with_overrides

FLASH = parse_config(FLASH_0731, "config.json")


def test_inventory_of_the_release_has_its_published_counts_and_bytes() -> None:
    target, draft = target_inventory(FLASH, quantised=True), dspark_inventory(FLASH, quantised=True)
    assert (len(target), sum(spec.nbytes for spec in target)) == (67_612, 156_015_698_140)
    assert (len(draft), sum(spec.nbytes for spec in draft)) == (4_705, 10_862_838_300)
    whole = inventory(FLASH, quantised=True)
    assert (len(whole), sum(spec.nbytes for spec in whole)) == (72_317, 166_878_536_440)


def test_plain_inventory_is_the_same_tensors_without_scales() -> None:
    plain = {spec.name for spec in inventory(FLASH)}
    quantised = [spec.name for spec in inventory(FLASH, quantised=True)]
    assert plain == {name for name in quantised if not name.endswith(".scale")}


def test_the_preview_holds_one_nextn_block() -> None:
    shapes = {spec.name: spec.shape for spec in inventory(parse_config(F4_PREVIEW, "config.json"))}
    draft = {name.removeprefix("mtp.0."): shape for name, shape in shapes.items() if name.startswith("mtp.")}
    assert draft["enorm.weight"] == draft["hnorm.weight"] == draft["norm.weight"] == (64,)
    assert draft["e_proj.weight"] == draft["h_proj.weight"] == (64, 64)
    assert draft["hc_head_fn"] == (2, 128)
    assert draft["ffn.gate.bias"] == (4,)
    assert not any("compressor" in name or "tid2eid" in name for name in draft)


def test_the_nextn_block_of_the_release_has_its_published_size() -> None:
    """About 3.594 GB (`spec/dspark.md` section 12)."""
    preview = {name: value for name, value in FLASH_0731.items() if not name.startswith("dspark_")}
    block = nextn_inventory(parse_config(preview, "config.json"), quantised=True)
    assert round(sum(spec.nbytes for spec in block) / 1e6) == 3594


def test_every_name_occurs_once() -> None:
    names = [spec.name for spec in inventory(FLASH)]
    assert len(set(names)) == len(names)


def test_shapes_of_the_toy_follow_its_config() -> None:
    shapes = {spec.name: spec.shape for spec in inventory(parse_config(F4, "config.json"))}
    assert shapes["layers.2.attn.compressor.ape"] == (4, 64), "CSA: two halves"
    assert shapes["layers.3.attn.compressor.ape"] == (8, 32), "HCA: one"
    assert shapes["layers.3.attn.compressor.wkv.weight"] == (32, 64)
    assert shapes["layers.4.attn.indexer.compressor.wgate.weight"] == (32, 64)
    assert shapes["layers.0.attn.wo_a.weight"] == (32, 64), "[o_groups * o_lora_rank, heads of a group * head_dim]"
    assert shapes["layers.0.ffn.gate.tid2eid"] == (320, 2)
    assert "layers.0.ffn.gate.bias" not in shapes, "hash layers have no bias"
    assert shapes["layers.1.ffn.gate.bias"] == shapes["mtp.0.ffn.gate.bias"] == (4,)
    assert shapes["layers.5.hc_attn_fn"] == (8, 128)
    assert shapes["mtp.0.main_proj.weight"] == (64, 192)
    assert shapes["mtp.2.confidence_head.proj.weight"] == (1, 72)
    assert not any(
        ".compressor" in name for name in shapes if name.startswith(("mtp.", "layers.0.", "layers.3.attn.i"))
    )


def test_draft_tensors_follow_the_drafter_settings() -> None:
    assert not any(spec.name.startswith("mtp.") for spec in inventory(parse_config(F4_PLAIN, "config.json")))

    def shapes(**overrides: object) -> dict[str, tuple[int, ...]]:
        return {
            spec.name: spec.shape for spec in inventory(parse_config(with_overrides(F4, **overrides), "config.json"))
        }

    assert "mtp.2.confidence_head.proj.weight" not in shapes(enable_confidence_head=False)
    assert shapes(confidence_head_with_markov=False)["mtp.2.confidence_head.proj.weight"] == (1, 64)
    assert not any("_proj" in name for name in shapes() if "markov_head" in name)
    gated = shapes(dspark_markov_head_type="gated")
    assert gated["mtp.2.markov_head.gate_proj.weight"] == (8, 64 + 8)
    assert gated["mtp.2.markov_head.gate_proj.bias"] == (8,)
    rnn = shapes(dspark_markov_head_type="rnn")
    assert rnn["mtp.2.markov_head.joint_proj.weight"] == (24, 2 * 8 + 64)
    assert rnn["mtp.2.markov_head.joint_proj.bias"] == (24,)
    assert "mtp.1.markov_head.markov_w1.weight" in shapes(dspark_target_layer_ids=[4, 5]), (
        "the last stage holds the heads"
    )
