"""The config.json of a DSpark draft whose target is a dense network (Qwen3, Gemma4), in every spelling it is found in.

Such a folder holds the draft alone. Its config is a copy of the target's with the draft's fields at top level, under
`dflash_config` or under `dspark_config`: later places override earlier ones, and a `dspark_*` field at top level beats
them all (`spec/dspark.md` section 2.2). Exports of the "speculators" format keep the layers' own fields in
`transformer_layer_config`, count captured layers from the embedding (`aux_hidden_state_layer_ids`, one higher), and
read no token from the anchor's row unless they say so. The layers themselves are not read: dense targets are not built.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from twostroke.builder.config import SIZE, UNSUPPORTED_MODEL_TYPES, read_markov_head_type
from twostroke.builder.strict_json import Fields, shown, shown_list
from twostroke.engines.errors import ConfigError

# Field -> what it may be called behind `dspark_`, at top level only.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "block_size": ("block_size",),
    "target_layer_ids": ("target_layer_ids",),
    "mask_token_id": ("mask_token_id", "noise_token_id"),
    "num_target_layers": ("num_target_layers",),
    "markov_rank": ("markov_rank",),
    "markov_head_type": ("markov_head_type",),
    "enable_confidence_head": ("enable_confidence_head",),
    "confidence_head_with_markov": ("confidence_head_with_markov",),
    "sample_from_anchor": ("sample_from_anchor",),
    "draft_vocab_size": ("draft_vocab_size",),
    "target_hidden_size": ("target_hidden_size",),
}
_SECTIONS = ("dflash_config", "dspark_config")
# With any of these the head's type may be left out, as V4 leaves it out.
_PREFIXED_STYLE = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
# Fields of the sections that only training reads.
_TRAINING = ("num_anchors", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma")

_EMBEDDING = -1
_MOST_LAYERS = 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DenseDraftConfig:
    """What the draft reads of its target, how a block is laid out, and its two heads."""

    quantised: ClassVar[bool] = False  # its weights are floats

    base: str  # model type of its layers
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int  # of the draft
    block_size: int  # rows of a block: the anchor, then masks
    sample_from_anchor: bool  # whether the anchor's row predicts the first token; otherwise row 0 is dropped
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based, their outputs in this order; -1 is the embedding
    num_target_layers: int | None  # the "speculators" format does not say
    target_hidden_size: int
    markov_rank: int  # 0: no markov head
    markov_head_type: str | None
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    draft_vocab_size: int  # below vocab_size the draft has a map of its ids to the target's, d2t
    speculators: bool  # the format it was exported in

    @property
    def draft_len(self) -> int:
        """Tokens drafted per iteration, gamma: a row each, without the anchor's where that is dropped."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


def is_dense_draft(values: Mapping[str, Any]) -> bool:
    """Whether a config.json object describes a draft of a target that is no family of ours."""
    from twostroke.builder.networks.registry import TARGETS  # here: networks are written in terms of `config`

    if values.get("speculators_model_type") == "dspark":
        return True
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type in TARGETS or model_type in UNSUPPORTED_MODEL_TYPES:
        return False
    marked = any(name.startswith("dspark_") or name in ("dflash_config", "markov_rank") for name in values)
    return marked or {"target_layer_ids", "block_size"} <= values.keys()


def refuse_to_build(values: Mapping[str, Any], where: str, supported: Collection[str]) -> ConfigError:
    """The sentence a build of such a folder ends with."""
    layers = values.get("transformer_layer_config")
    base = layers.get("model_type") if isinstance(layers, Mapping) else values.get("model_type")
    return ConfigError(
        f"{where} describes a draft for a dense target ({shown(base)}); dense targets are not supported for building "
        f"(supported model types: {', '.join(supported)}); `twostroke inspect` explains the folder"
    )


def read_dense_draft(values: Mapping[str, Any], where: str) -> DenseDraftConfig:
    """The draft's fields, checked. `where` names the file in errors. Raises ConfigError in one sentence."""
    outer = Fields(values, where)
    kind = outer.take("speculators_model_type", None)
    if kind not in (None, "dspark"):
        raise outer.refused("speculators_model_type", kind, "accepted: dspark")
    speculators = kind is not None
    layers = _layers(outer)
    fields = _merged(outer)
    vocab, hidden = layers.integer("vocab_size", 2, SIZE[1]), layers.integer("hidden_size", *SIZE)
    from_anchor = fields.boolean("sample_from_anchor", not speculators)
    count = None
    if "num_target_layers" in fields.values or not speculators:
        count = fields.integer("num_target_layers", 2, _MOST_LAYERS)
    rank = fields.integer("markov_rank", 0, SIZE[1])
    prefixed = any(outer.values.get(name) is not None for name in _PREFIXED_STYLE)
    head = read_markov_head_type(fields, "vanilla" if prefixed or rank == 0 else ...)
    confident = fields.boolean("enable_confidence_head", True)
    with_markov = fields.boolean("confidence_head_with_markov", rank > 0)
    if confident and with_markov and rank == 0:
        raise fields.refused("confidence_head_with_markov", True, "but markov_rank is 0: no embedding to read")
    return DenseDraftConfig(
        base=str(layers.take("model_type")),
        hidden_size=hidden,
        vocab_size=vocab,
        num_hidden_layers=layers.integer("num_hidden_layers", 1, _MOST_LAYERS),
        block_size=fields.integer("block_size", 1 if from_anchor else 2, 64),
        sample_from_anchor=from_anchor,
        mask_token_id=fields.integer("mask_token_id", 0, vocab - 1),
        target_layer_ids=_target_layers(outer, fields, count),
        num_target_layers=count,
        target_hidden_size=fields.integer("target_hidden_size", *SIZE, default=hidden),
        markov_rank=rank,
        markov_head_type=head if rank else None,  # exports write the type even where there is no head
        enable_confidence_head=confident,
        confidence_head_with_markov=confident and with_markov,
        draft_vocab_size=fields.integer("draft_vocab_size", 2, vocab, default=vocab),
        speculators=speculators,
    )


class _Merged(Fields):
    """Fields from several places; errors name the place a value came from."""

    def __init__(self, values: Mapping[str, Any], where: str, places: Mapping[str, str]) -> None:
        super().__init__(values, where)
        self.places = places

    def refused(self, name: str, found: object, accepted: str) -> ConfigError:
        field, bracket, index = name.partition("[")
        return super().refused(self.places.get(field, field) + bracket + index, found, accepted)


def _layers(outer: Fields) -> Fields:
    """The fields of the draft's own layers."""
    inner = outer.take("transformer_layer_config", None)
    if inner is None:
        return outer
    if not isinstance(inner, Mapping):
        raise outer.refused("transformer_layer_config", inner, "expected an object")
    return Fields(inner, outer.where, prefix="transformer_layer_config.")


def _merged(outer: Fields) -> _Merged:
    """The draft's fields by their plain names, each from the last place that has it. An override is a warning; null
    counts as absent."""
    sections = {}
    for name in _SECTIONS:
        found = outer.take(name, None)
        if not isinstance(found, Mapping | None):
            raise outer.refused(name, found, "expected an object")
        sections[name] = Fields(found or {}, outer.where, prefix=f"{name}.")
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for field, prefixed in _FIELDS.items():
        found_at = [(field, outer.take(field, None))]
        found_at += [(f"{name}.{field}", section.take(field, None)) for name, section in sections.items()]
        found_at += [(f"dspark_{name}", outer.take(f"dspark_{name}", None)) for name in prefixed]
        for place, value in found_at:
            if value is None:
                continue
            if field in values and values[field] != value:
                before = f"{places[field]} = {shown(values[field])}"
                _log.warning("%s: %s = %s overrides %s", outer.where, place, shown(value), before)
            values[field], places[field] = value, place
    for section in sections.values():
        section.check_all_taken(_TRAINING)
    foreign = sorted(name for name in outer.values if name.startswith("dspark_") and name not in outer.taken)
    if foreign:
        raise ConfigError(
            f"{outer.where}: not understood: {shown_list(foreign)}; a field that may change the draft is never ignored"
        )
    return _Merged(values, outer.where, places)


def _target_layers(outer: Fields, fields: _Merged, count: int | None) -> tuple[int, ...]:
    """Ids of the captured layers, in the order they are read."""
    last = (_MOST_LAYERS if count is None else count) - 1
    name, found, shift = "target_layer_ids", fields.take("target_layer_ids", None), 0
    counted = outer.take("aux_hidden_state_layer_ids", None)
    if counted is not None and found is None:
        name, found, shift = "aux_hidden_state_layer_ids", counted, 1
    elif found is None:
        raise fields.missing(name)
    ids = tuple(i - shift for i in fields.integers(name, found, _EMBEDDING + shift, last + shift))
    if counted is not None and counted != [i + 1 for i in ids]:
        accepted = f"but aux_hidden_state_layer_ids, which counts one higher, is {shown(counted)}; keep one"
        raise fields.refused(name, found, accepted)
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        raise fields.refused(name, found, "expected each layer once, in ascending order")
    if count is not None and ids[-1] == last:
        accepted = f"{last + shift} is the last of the target's {count} layers, whose output is captured normed"
        raise fields.refused(name, found, f"{accepted}; accepted: {_EMBEDDING + shift} to {last - 1 + shift}")
    return ids
