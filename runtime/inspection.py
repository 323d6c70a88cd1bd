"""An engine directory in words and numbers, from its manifest alone: nothing is loaded and no weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from twostroke.engines.manifest import (
    Manifest,
    StateTensor,
    Step,
    bytes_per_slot,
    bytes_per_token,
    read_manifest,
    read_weights_index,
    state_bytes,
)
from twostroke.runtime.runtime_config import Limits, RuntimeConfig

# Parts of a draft that a checkpoint may lack or a loader may miss, by the word their weights carry.
HEADS = ("markov_head", "confidence_head")


def inspect_engine(folder: Path, *, batch_size: int | None = None, seq_len: int | None = None) -> dict[str, Any]:
    """Everything `twostroke inspect` tells, ready to be written as JSON. EngineError if it is no engine directory.

    Memory is that of `batch_size` requests of `seq_len` tokens, by default the engine's own limits; ConfigError for
    what the engine cannot honour."""
    manifest = read_manifest(folder)
    index = read_weights_index(folder)
    config = manifest.pretrained_config
    build = manifest.build_config
    inside = sum(record.bytes for record in index.weights.values() if not Path(record.file).is_absolute())
    total = sum(record.bytes for record in index.weights.values())
    limits = RuntimeConfig(max_batch_size=batch_size, max_seq_len=seq_len).limits(manifest)
    state = state_bytes(manifest.state, limits.max_batch_size, limits.max_seq_len, build.tokens_per_page)
    return {
        "path": str(folder),
        "schema": manifest.schema,
        "twostroke_version": manifest.twostroke_version,
        "model": {
            "architecture": architecture(manifest),
            "model_type": config.get("model_type"),
            "layers": config.get("num_hidden_layers"),
            "vocab_size": build.vocab_size,
            "dtype": build.dtype,
        },
        "limits": {
            "max_seq_len": build.max_seq_len,
            "max_draft_len": build.max_draft_len,
            "max_batch_size": build.max_batch_size,
            "tokens_per_page": build.tokens_per_page,
            "eos_token_ids": list(build.eos_token_ids),
            "bos_token_id": build.bos_token_id,
        },
        "speculation": {
            "method": manifest.speculative.method,
            "draft_length": manifest.speculative.draft_len,
            "trained_length": manifest.speculative.trained_len,
            "taps_width": manifest.speculative.taps_width,
            "heads": heads(manifest),
        },
        "attention": {
            "prefill_backend": build.prefill_backend,
            "decode_backend": build.decode_backend,
            "kv_cache_dtype": build.kv_cache_dtype,
            "index_key_dtype": build.index_key_dtype,
        },
        "steps": {name: _step(step) for name, step in manifest.steps.items()},
        "state": _state(manifest.state, build.tokens_per_page),
        "weights": {
            "bindings": len(index.weights),
            "bytes": total,
            "bytes_in_directory": inside,
            "bytes_in_checkpoint": total - inside,
            "shards": sorted(index.shards),
        },
        "memory": {
            "batch_size": limits.max_batch_size,
            "seq_len": limits.max_seq_len,
            "weights": total,
            "state": state,
            "total": total + state,
        },
        "self_check": msgspec.to_builtins(manifest.self_check),
        "files": {name: record.bytes for name, record in manifest.files.items()},
    }


def architecture(manifest: Manifest) -> str:
    """The model class the checkpoint names."""
    names = manifest.pretrained_config.get("architectures") or ["unnamed model"]
    return str(names[0])


def heads(manifest: Manifest) -> dict[str, bool]:
    """Which heads of a draft that proposes in one step have weights; empty for every other engine."""
    propose = manifest.steps.get("propose")
    if propose is None:
        return {}
    weights = [binding.name for binding in propose.bindings if binding.role == "weight"]
    return {head: any(head in name for name in weights) for head in HEADS}


def startup_line(manifest: Manifest, limits: Limits) -> str:
    """Model, draft method, depth and heads in one line."""
    layers = manifest.pretrained_config.get("num_hidden_layers")
    speculative = manifest.speculative
    if speculative.method == "none":
        draft = "no draft"
    else:
        loaded = "".join(f", {head} {'loaded' if there else 'missing'}" for head, there in heads(manifest).items())
        depth = f", depth {limits.draft_length} of {speculative.draft_len}" if limits.draft_length else " switched off"
        draft = f"draft {speculative.method}{depth}{loaded}"
    engines = ", ".join(sorted({step.engine for step in manifest.steps.values()}))
    size = "" if layers is None else f", {layers} layers"
    build = manifest.build_config
    attention = " and ".join(dict.fromkeys((build.prefill_backend, build.decode_backend)))
    return (
        f"{architecture(manifest)}{size}; {draft}; {engines}, attention {attention}; up to {limits.max_batch_size} "
        f"requests of "
        f"{limits.max_seq_len} tokens"
    )


def render(report: dict[str, Any]) -> str:
    """The report as lines for a person."""
    model, limits, speculation = report["model"], report["limits"], report["speculation"]
    state, weights, attention = report["state"], report["weights"], report["attention"]
    memory = report["memory"]
    forced = f", a forced block: trained for {speculation['trained_length']}" if speculation["trained_length"] else ""
    lines = [
        f"{report['path']}: engine directory, schema {report['schema']}, built by twostroke "
        f"{report['twostroke_version']}",
        f"model        {model['architecture']}, {model['layers'] or 'unknown number of'} layers, "
        f"vocabulary {model['vocab_size']}, {model['dtype']}",
        f"limits       {limits['max_seq_len']} tokens a request, pages of {limits['tokens_per_page']} tokens, "
        f"end of text {', '.join(map(str, limits['eos_token_ids'])) or 'none'}",
        f"             batches of {limits['max_batch_size']} where nothing else is asked for",
        f"speculation  {speculation['method']}, {speculation['draft_length']} tokens drafted an iteration{forced}",
    ]
    lines += [f"             {head} {'loaded' if there else 'missing'}" for head, there in speculation["heads"].items()]
    lines.append(
        f"attention    {attention['prefill_backend']} in prefill, {attention['decode_backend']} in verify and decode; "
        f"memory in {attention['kv_cache_dtype']}, index keys in {attention['index_key_dtype']}"
    )
    for name, step in report["steps"].items():
        versions = ", ".join(f"{package} {version}" for package, version in step["versions"].items())
        lines.append(
            f"step         {name}: {step['engine']} ({step['stage']}, {step['device']}) {step['file']}; "
            f"{step['inputs']} inputs, {step['states']} states ({step['in_place']} in place), "
            f"{step['weights']} weights, {step['outputs']} outputs{f'; {versions}' if versions else ''}"
        )
    lines += [
        f"state        {state['tensors']} tensors; {state['bytes_per_token']:.1f} bytes a token, "
        f"{state['bytes_per_slot']} bytes a slot",
        *(
            f"             {layout}: {found['tensors']} tensors, {found['bytes_per_token']:g} bytes a token each"
            for layout, found in state["packed"].items()
        ),
        f"weights      {weights['bindings']} bindings, {weights['bytes']} bytes, "
        f"{weights['bytes_in_directory']} of them in the directory",
        f"memory       {memory['total']} bytes for {memory['batch_size']} requests of {memory['seq_len']} tokens: "
        f"weights {memory['weights']}, state {memory['state']}",
    ]
    check = report["self_check"]
    if check["done"]:
        lines.append(
            f"checked      against its network when built: {check['what']}, largest error {check['error']:.0e}"
        )
    else:
        lines.append(f"not checked  against its network when built: {check['what']}")
    lines += [f"shard        {shard}" for shard in weights["shards"]]
    lines += [f"file         {name}, {size} bytes" for name, size in report["files"].items()]
    if report.get("verified"):
        lines.append("verified     every file has the hash it was built with")
    return "\n".join(lines)


def _step(step: Step) -> dict[str, Any]:
    roles = [binding.role for binding in step.bindings]
    aliased = sum(binding.alias is not None for binding in step.bindings)
    return {
        "engine": step.engine,
        "stage": step.stage,
        "device": step.device,
        "file": step.file,
        "versions": step.versions,
        "inputs": roles.count("input"),
        "states": roles.count("state"),
        "weights": roles.count("weight"),
        "outputs": roles.count("output") - aliased,
        "in_place": aliased,
    }


def _state(tensors: tuple[StateTensor, ...], tokens_per_page: int) -> dict[str, Any]:
    paged = [tensor for tensor in tensors if tensor.addressing == "paged"]
    return {
        "tensors": len(tensors),
        "bytes_per_token": bytes_per_token(tensors, tokens_per_page),
        "bytes_per_slot": bytes_per_slot(tensors),
        "packed": {
            tensor.layout: {
                "tensors": sum(other.layout == tensor.layout for other in paged),
                "bytes_per_token": bytes_per_token((tensor,), tokens_per_page),
            }
            for tensor in paged
            if tensor.planes
        },
    }
