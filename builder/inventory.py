"""Every tensor a checkpoint must hold, in its original names, derived from the config: the form of such a list, and
DeepSeek-V4's. The lists of other families stand beside their networks.

Sources: `spec/deepseek_v4.md` section 10.1, `spec/dspark.md` sections 11 and 12. The inventory of the release's own
numbers, scales included, reproduces its published tensor and byte counts exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.builder.config import CSA, SLIDING, DeepseekV4Config

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

FP8_BLOCK = 128  # weights per scale along both axes
FP4_GROUP = 32  # weights per scale along the row

WEIGHT_DTYPES = ("BF16", "F32")
FLOAT_DTYPES = ("F32", "BF16")  # kept in F32 by a release: hyper-connections, sinks, ape, gate bias


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a checkpoint must hold it. `dtypes` are the accepted safetensors dtypes, the usual one first.

    A draft's embedding and head are `copy_of` the target's in a release: a checkpoint may leave them out.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    copy_of: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the usual dtype."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtypes[0]]


def inventory(config: DeepseekV4Config, *, quantised: bool = False) -> tuple[TensorSpec, ...]:
    """Target tensors, then those of the drafter the config promises: DSpark stages, else a NextN block, else none.

    `quantised` gives the release's storage: FP8 linears, packed FP4 experts and a `.scale` beside each.
    """
    draft: tuple[TensorSpec, ...] = ()
    if config.dspark:
        draft = dspark_inventory(config, quantised=quantised)
    elif config.num_nextn_predict_layers:
        draft = nextn_inventory(config, quantised=quantised) + nextn_copies(config)
    return target_inventory(config, quantised=quantised) + draft


def target_inventory(config: DeepseekV4Config, *, quantised: bool = False) -> tuple[TensorSpec, ...]:
    """Embedding, layers, final norm, final stream collapse and output head."""
    return tuple(_target(config, quantised))


def dspark_inventory(config: DeepseekV4Config, *, quantised: bool = False) -> tuple[TensorSpec, ...]:
    """The draft stages `mtp.*`. Embedding and head are the target's. Raises ValueError without `config.dspark`."""
    if config.dspark is None:
        raise ValueError("this config has no DSpark drafter")
    return tuple(_dspark(config, quantised))


def nextn_inventory(config: DeepseekV4Config, *, quantised: bool = False) -> tuple[TensorSpec, ...]:
    """The Preview's NextN block `mtp.0`. Embedding and head are the target's; see `nextn_copies`."""
    return tuple(_nextn(config, quantised))


def nextn_copies(config: DeepseekV4Config) -> tuple[TensorSpec, ...]:
    """The block's own embedding and head, which some releases store beside the target's."""
    whole = (config.vocab_size, config.hidden_size)
    return (
        TensorSpec("mtp.0.emb.tok_emb.weight", whole, WEIGHT_DTYPES, "embed.weight"),
        TensorSpec("mtp.0.head.weight", whole, WEIGHT_DTYPES, "head.weight"),
    )


def _target(config: DeepseekV4Config, quantised: bool) -> Iterator[TensorSpec]:
    D = config.hidden_size
    yield TensorSpec("embed.weight", (config.vocab_size, D), WEIGHT_DTYPES)
    for layer, (kind, ratio) in enumerate(zip(config.layer_types, config.compress_ratios, strict=True)):
        prefix = f"layers.{layer}."
        yield from _block(config, prefix, quantised, hashed=layer < config.num_hash_layers)
        if kind != SLIDING:
            yield from _compressor(config, f"{prefix}attn.compressor.", ratio, config.head_dim, overlapping=kind == CSA)
        if kind == CSA:
            indexer = f"{prefix}attn.indexer."
            width = config.index_n_heads * config.index_head_dim
            yield from _linear(f"{indexer}wq_b", width, config.q_lora_rank, quantised)
            yield TensorSpec(f"{indexer}weights_proj.weight", (config.index_n_heads, D), WEIGHT_DTYPES)
            yield from _compressor(config, f"{indexer}compressor.", ratio, config.index_head_dim, overlapping=True)
    yield TensorSpec("norm.weight", (D,), WEIGHT_DTYPES)
    yield from _hc_head(config, "")
    yield TensorSpec("head.weight", (config.vocab_size, D), WEIGHT_DTYPES)


def _dspark(config: DeepseekV4Config, quantised: bool) -> Iterator[TensorSpec]:
    dspark, D, V = config.dspark, config.hidden_size, config.vocab_size
    assert dspark is not None
    last = f"mtp.{dspark.stages - 1}."
    yield from _linear("mtp.0.main_proj", D, dspark.stages * D, quantised)
    yield TensorSpec("mtp.0.main_norm.weight", (D,), WEIGHT_DTYPES)
    for stage in range(dspark.stages):
        yield from _block(config, f"mtp.{stage}.", quantised, hashed=False)
    yield TensorSpec(f"{last}norm.weight", (D,), WEIGHT_DTYPES)
    yield from _hc_head(config, last)
    head, rank = f"{last}markov_head.", dspark.markov_rank
    yield from markov_head_tensors(head, dspark.markov_head_type, vocab=V, draft_vocab=V, rank=rank, hidden=D)
    if dspark.enable_confidence_head:
        width = D + (rank if dspark.confidence_head_with_markov else 0)
        yield TensorSpec(f"{last}confidence_head.proj.weight", (1, width), WEIGHT_DTYPES)


def markov_head_tensors(
    prefix: str, kind: str, *, vocab: int, draft_vocab: int, rank: int, hidden: int
) -> Iterator[TensorSpec]:
    """A markov head of a type of MARKOV_HEAD_TYPES: it embeds any of `vocab` tokens and scores `draft_vocab`."""
    yield TensorSpec(f"{prefix}markov_w1.weight", (vocab, rank), WEIGHT_DTYPES)
    yield TensorSpec(f"{prefix}markov_w2.weight", (draft_vocab, rank), WEIGHT_DTYPES)
    if kind == "gated":
        yield TensorSpec(f"{prefix}gate_proj.weight", (rank, hidden + rank), WEIGHT_DTYPES)
        yield TensorSpec(f"{prefix}gate_proj.bias", (rank,), WEIGHT_DTYPES)
    if kind == "rnn":
        yield TensorSpec(f"{prefix}joint_proj.weight", (3 * rank, 2 * rank + hidden), WEIGHT_DTYPES)
        yield TensorSpec(f"{prefix}joint_proj.bias", (3 * rank,), WEIGHT_DTYPES)


def _nextn(config: DeepseekV4Config, quantised: bool) -> Iterator[TensorSpec]:
    D = config.hidden_size
    for name in ("enorm", "hnorm", "norm"):
        yield TensorSpec(f"mtp.0.{name}.weight", (D,), WEIGHT_DTYPES)
    for name in ("e_proj", "h_proj"):
        yield from _linear(f"mtp.0.{name}", D, D, quantised)
    yield from _block(config, "mtp.0.", quantised, hashed=False)
    yield from _hc_head(config, "mtp.0.")


def _block(config: DeepseekV4Config, prefix: str, quantised: bool, hashed: bool) -> Iterator[TensorSpec]:
    """What every layer and every draft stage has: two hyper-connections, attention without compressor, experts."""
    D, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    streams = config.hc_mult
    mixes = (2 + streams) * streams  # pre, post, and the mixing matrix
    for site in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}{site}_norm.weight", (D,), WEIGHT_DTYPES)
        yield TensorSpec(f"{prefix}hc_{site}_fn", (mixes, streams * D), FLOAT_DTYPES)
        yield TensorSpec(f"{prefix}hc_{site}_base", (mixes,), FLOAT_DTYPES)
        yield TensorSpec(f"{prefix}hc_{site}_scale", (3,), FLOAT_DTYPES)
    attn, grouped = f"{prefix}attn.", config.o_groups * config.o_lora_rank
    yield TensorSpec(f"{attn}attn_sink", (heads,), FLOAT_DTYPES)
    yield TensorSpec(f"{attn}q_norm.weight", (config.q_lora_rank,), WEIGHT_DTYPES)
    yield TensorSpec(f"{attn}kv_norm.weight", (head_dim,), WEIGHT_DTYPES)
    yield from _linear(f"{attn}wq_a", config.q_lora_rank, D, quantised)
    yield from _linear(f"{attn}wq_b", heads * head_dim, config.q_lora_rank, quantised)
    yield from _linear(f"{attn}wkv", head_dim, D, quantised)
    yield from _linear(f"{attn}wo_a", grouped, heads // config.o_groups * head_dim, quantised)
    yield from _linear(f"{attn}wo_b", D, grouped, quantised)
    ffn, experts, width = f"{prefix}ffn.", config.n_routed_experts, config.moe_intermediate_size
    yield TensorSpec(f"{ffn}gate.weight", (experts, D), WEIGHT_DTYPES)
    if hashed:
        yield TensorSpec(f"{ffn}gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), ("I64",))
    else:
        yield TensorSpec(f"{ffn}gate.bias", (experts,), FLOAT_DTYPES)
    for expert in range(experts):
        for name, shape in (("w1", (width, D)), ("w2", (D, width)), ("w3", (width, D))):
            yield from _expert(f"{ffn}experts.{expert}.{name}", *shape, quantised)
    for name, shape in (("w1", (width, D)), ("w2", (D, width)), ("w3", (width, D))):
        yield from _linear(f"{ffn}shared_experts.{name}", *shape, quantised)


def _compressor(
    config: DeepseekV4Config, prefix: str, ratio: int, head_dim: int, overlapping: bool
) -> Iterator[TensorSpec]:
    """A KV compressor. The overlapping form (CSA) projects two halves: for the next window and for the current one."""
    width = 2 * head_dim if overlapping else head_dim
    yield TensorSpec(f"{prefix}ape", (ratio, width), FLOAT_DTYPES)
    yield TensorSpec(f"{prefix}norm.weight", (head_dim,), WEIGHT_DTYPES)
    yield TensorSpec(f"{prefix}wkv.weight", (width, config.hidden_size), WEIGHT_DTYPES)
    yield TensorSpec(f"{prefix}wgate.weight", (width, config.hidden_size), WEIGHT_DTYPES)


def _hc_head(config: DeepseekV4Config, prefix: str) -> Iterator[TensorSpec]:
    """The collapse of the streams after the last layer."""
    streams = config.hc_mult
    yield TensorSpec(f"{prefix}hc_head_fn", (streams, streams * config.hidden_size), FLOAT_DTYPES)
    yield TensorSpec(f"{prefix}hc_head_base", (streams,), FLOAT_DTYPES)
    yield TensorSpec(f"{prefix}hc_head_scale", (1,), FLOAT_DTYPES)


def _linear(name: str, rows: int, columns: int, quantised: bool) -> Iterator[TensorSpec]:
    if not quantised:
        yield TensorSpec(f"{name}.weight", (rows, columns), WEIGHT_DTYPES)
        return
    yield TensorSpec(f"{name}.weight", (rows, columns), ("F8_E4M3",))
    yield TensorSpec(f"{name}.scale", (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)), ("F8_E8M0",))


def _expert(name: str, rows: int, columns: int, quantised: bool) -> Iterator[TensorSpec]:
    if not quantised:
        yield TensorSpec(f"{name}.weight", (rows, columns), WEIGHT_DTYPES)
        return
    yield TensorSpec(f"{name}.weight", (rows, columns // 2), ("I8",))  # two FP4 values per byte
    yield TensorSpec(f"{name}.scale", (rows, columns // FP4_GROUP), ("F8_E8M0",))
