"""The text: sources of the installed standard library, never copied anywhere.

Whether a module is held out depends on a hash of its name alone, so it was settled before any training and is the same
for every Python version.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

HELD_OUT_BELOW = 13  # of 256: about one module in twenty
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
# Generated tables: near copies of each other, and no text that anybody wrote.
SKIPPED_PREFIXES = ("_sysconfigdata", "html.entities", "encodings.")


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def held_out(module: str) -> bool:
    return hashlib.sha256(module.encode()).digest()[0] < HELD_OUT_BELOW


def modules(root: Path) -> dict[str, str]:
    """Dotted module name -> source text, sorted by name."""
    found: dict[str, str] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS & set(parts) or parts[0].startswith("config-"):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name.startswith(SKIPPED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            found[name] = text
    return dict(sorted(found.items()))


def split(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Training modules, held-out modules."""
    every = modules(root)
    training = {name: text for name, text in every.items() if not held_out(name)}
    return training, {name: text for name, text in every.items() if held_out(name)}


@dataclass(frozen=True)
class Prompt:
    module: str
    line: int
    text: str
    token_ids: tuple[int, ...]  # with the beginning-of-sentence token


def prompts(
    held: dict[str, str], tokenizer: Tokenizer, count: int = 100, low: int = 96, high: int = 224
) -> list[Prompt]:
    """`count` runs of whole lines, each starting at a top-level line, `low` to `high` tokens long, none overlapping.

    Places and lengths follow from hashes of module name and line, so the same Python gives the same list.
    """
    places: list[tuple[bytes, str, int]] = []
    for name, text in held.items():
        for number, line in enumerate(text.split("\n")):
            if line[:1].strip():
                places.append((hashlib.sha256(f"{name}:{number}".encode()).digest(), name, number))
    taken: dict[str, list[range]] = {}
    chosen: list[Prompt] = []
    for digest, name, number in sorted(places):
        lines = held[name].split("\n")
        wanted = low + int.from_bytes(digest[:4]) % (high - low)
        end, ids = number, [0]
        while end < len(lines) and len(ids) < wanted:
            end += 1
            ids = tokenizer.encode("\n".join(lines[number:end])).ids
        overlaps = any(number < other.stop and other.start < end for other in taken.get(name, []))
        if overlaps or not low <= len(ids) <= high:
            continue
        taken.setdefault(name, []).append(range(number, end))
        chosen.append(Prompt(name, number, "\n".join(lines[number:end]), tuple(ids)))
        if len(chosen) == count:
            return chosen
    raise ValueError(f"the held-out modules hold only {len(chosen)} prompts of {low} to {high} tokens, wanted {count}")
