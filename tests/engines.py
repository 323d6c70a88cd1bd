"""Compiled toy engines for tests, built once per state of the code and shared by every test process."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twostroke.builder.build import BuildOptions, build
from twostroke.tests.checkpoints import F4, write_checkpoint

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".pytest_cache" / "engines"


def code_hash() -> str:
    """Hash of every source an engine directory depends on."""
    digest = hashlib.sha256()
    for folder in ("builder", "plugins", "engines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "demo" not in path.parts and "accept" not in path.parts:
                digest.update(path.read_bytes())
    digest.update((ROOT / "tests" / "checkpoints.py").read_bytes() + Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Holds `place`, made if need be, against other test processes."""
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer with bos 0 and eos 1, every byte a token, the rest unused."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1} | {symbol: 2 + i for i, symbol in enumerate(alphabet)}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))


def engine_directory(
    config: Mapping[str, Any] = F4,
    *,
    draft: str = "auto",
    max_draft_len: int | None = None,
    force_draft_len: bool = False,
    index_key_dtype: str = "float32",
    seed: int = 0,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """The engine directory of a toy checkpoint; its checkpoint lies beside it as `checkpoint`."""
    choices = [draft, max_draft_len, force_draft_len, index_key_dtype, seed, tokenizer, repr(sorted(overrides.items()))]
    key = json.dumps([sorted(config.items()), *choices], default=repr)
    place = CACHE / hashlib.sha256((code_hash() + key).encode()).hexdigest()[:16]
    with locked(place):
        if not (place / "engine" / "config.json").exists():
            write_checkpoint(place / "checkpoint", config, seed=seed, **overrides)
            if tokenizer:
                write_byte_tokenizer(place / "checkpoint", {**config, **overrides}["vocab_size"])
            options = BuildOptions(
                draft=draft,
                max_draft_len=max_draft_len,
                force_draft_len=force_draft_len,
                index_key_dtype=index_key_dtype,
                force=True,
            )
            build(place / "checkpoint", place / "engine", options)
    return place / "engine"
