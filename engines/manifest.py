"""What an engine directory says of itself: `config.json`, `weights.index.json`, and the state contract.

The runtime reads nothing else to know a model: no network, no framework. Files are msgspec structures, so a wrong
type or a missing field is an error that names its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from twostroke.engines.errors import EngineError

SCHEMA = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.index.json"
SCRATCH_SLOT = 0
SCRATCH_PAGE = 0
DEFAULT_MAX_BATCH_SIZE = 8
DEFAULT_MAX_SEQ_LEN = 8192


class Binding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named tensor of a step. `shape` mixes numbers and the letters of the design (N, R, S, P, M, ...);
    `alias` on an output names the input whose buffer it updates."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: Literal["input", "state", "weight", "output"]
    alias: str | None = None


class StateTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of per-request memory: one a layer and kind, addressed by position alone.

    `paged` rows are found through the page table (`rows` a page), `ring` position p sits at `slot*rows + p % rows`,
    `linear` row w at `slot*rows + w`. A row covers `tokens_per_row` tokens. A resumed ring needs the last
    `(P % ratio if ratio else 0) + lookback` positions.

    The array is [all rows, width]. In a packed layout a row does not lie in one piece: with `planes` the array is
    [pages, rows * width], and a page holds for each plane the pieces of that size of all its rows, row by row.
    """

    name: str
    addressing: Literal["paged", "ring", "linear"]
    tokens_per_row: int
    rows: int
    width: int
    dtype: str = "float32"
    layout: str = "rows"
    ratio: int = 0
    lookback: int = 0
    planes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.planes and (self.addressing != "paged" or sum(self.planes) != self.width):
            raise ValueError(f"state {self.name}: planes {self.planes} must be paged and add up to width {self.width}")

    def live(self, position: int) -> range:
        """Logical rows needed to resume when `position` tokens are committed: positions for rings, row numbers else."""
        if self.addressing == "ring":
            kept = (position % self.ratio if self.ratio else 0) + self.lookback
            return range(max(0, position - kept), position)
        return range(position // self.tokens_per_row)

    def bytes_for(self, slots: int, pages: int) -> int:
        """Bytes of the whole tensor."""
        return self.total_rows(slots, pages) * self.width * np.dtype(self.dtype).itemsize

    def total_rows(self, slots: int, pages: int) -> int:
        """Rows of the whole tensor for `slots` slots (scratch included) and `pages` pages (scratch included)."""
        return self.rows * (pages if self.addressing == "paged" else slots)

    @property
    def line(self) -> int:
        """Elements of one line of the array: a row, or a packed page."""
        return self.rows * self.width if self.planes else self.width

    def shape(self, slots: int, pages: int) -> tuple[int, int]:
        """Shape of the array for that many slots and pages."""
        return self.total_rows(slots, pages) // (self.rows if self.planes else 1), self.line


def bytes_per_token(tensors: Iterable[StateTensor], tokens_per_page: int) -> float:
    """Bytes of paged memory that each token of a request takes."""
    return sum(tensor.bytes_for(0, 1) for tensor in tensors if tensor.addressing == "paged") / tokens_per_page


def bytes_per_slot(tensors: Iterable[StateTensor]) -> int:
    """Bytes that each request takes beside its pages."""
    return sum(tensor.bytes_for(1, 0) for tensor in tensors if tensor.addressing != "paged")


def state_bytes(tensors: Iterable[StateTensor], requests: int, seq_len: int, tokens_per_page: int) -> int:
    """Bytes of all memory for `requests` requests of `seq_len` tokens, scratch slot and scratch page included."""
    pages = requests * -(-seq_len // tokens_per_page) + 1
    return sum(tensor.bytes_for(requests + 1, pages) for tensor in tensors)


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled step: which engine, which files, and every binding."""

    name: str
    engine: str
    stage: Literal["portable", "final"]
    file: str
    bindings: tuple[Binding, ...]
    versions: dict[str, str] = {}
    device: str = "cpu"


class BuildConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits fixed at build time. `tokens_per_page` is the unit of the page table; `max_draft_len` the drafted tokens
    per iteration the state rings have room for.

    `max_batch_size` is what the runtime takes where it is told nothing else: no dimension depends on it. The two
    backends are names of `attention_backends`; `kv_cache_dtype` is the dtype of the state tensors, but for index keys:
    `index_key_dtype` says whether those of target and draft are rows like all others, or rotated and packed in fp8."""

    max_seq_len: int
    max_draft_len: int
    tokens_per_page: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str = "float32"
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    prefill_backend: str = "portable"
    decode_backend: str = "portable"
    kv_cache_dtype: str = "float32"
    index_key_dtype: str = "float32"


class Speculative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The draft method and its widths: `draft_len` rows a block (G), `taps_width` hidden features a token (W).

    `trained_len` is the block the weights were trained for, where another one was forced."""

    method: str
    draft_len: int
    taps_width: int
    trained_len: int | None = None


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and SHA-256 of a file of the directory, checked at load. A large file has a fingerprint too
    (`file_records`), which is checked instead; its SHA-256 where that is asked for."""

    bytes: int
    sha256: str
    fingerprint: str | None = None


class SelfCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the build compared the engine with its network: on what and with which largest relative error, or why
    not."""

    done: bool
    what: str
    error: float = 0.0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`config.json` of an engine directory."""

    schema: int
    twostroke_version: str
    pretrained_config: dict[str, Any]
    build_config: BuildConfig
    speculative: Speculative
    steps: dict[str, Step]
    state: tuple[StateTensor, ...]
    files: dict[str, FileRecord]
    self_check: SelfCheck = SelfCheck(False, "not asked for")


class WeightRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the bytes of one weight binding are. `file` is relative to the directory, or an absolute path of a shard of
    the checkpoint whose bytes are usable as stored."""

    file: str
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    transform: str


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint shard the directory refers to: its size and the SHA-256 of its header."""

    bytes: int
    header_sha256: str


class WeightsIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`weights.index.json`."""

    weights: dict[str, WeightRecord]
    shards: dict[str, ShardRecord] = {}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an engine directory; EngineError says what is wrong with it and where."""
    manifest = _read(folder / CONFIG_FILE, Manifest)
    if manifest.schema != SCHEMA:
        raise EngineError(
            f"{folder / CONFIG_FILE}: schema {manifest.schema} found, {SCHEMA} expected; rebuild the engine with "
            "`twostroke build`"
        )
    return manifest


def read_weights_index(folder: Path) -> WeightsIndex:
    """The weights index of an engine directory."""
    return _read(folder / WEIGHTS_FILE, WeightsIndex)


def _read(path: Path, kind: type[Any]) -> Any:
    if not path.parent.is_dir():
        raise EngineError(
            f"{path.parent}: no such engine directory; build one with `twostroke build CHECKPOINT -o DIR`"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise EngineError(
            f"{path.parent} is not an engine directory: {path.name} is missing; build one with "
            "`twostroke build CHECKPOINT -o DIR`"
        ) from None
    except (msgspec.DecodeError, OSError) as error:
        raise EngineError(
            f"{path} cannot be read as a file of an engine directory ({error}); if this is a checkpoint, build it "
            "first with `twostroke build`"
        ) from None


def encode(value: msgspec.Struct) -> bytes:
    """Indented JSON of a manifest structure."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def named_dims(bindings: Mapping[str, Binding], shapes: Mapping[str, tuple[int, ...]], step: str) -> dict[str, int]:
    """Values of the named dimensions implied by `shapes`; EngineError if a rank, a number or a name disagrees."""
    dims: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, shape in shapes.items():
        expected = bindings[name].shape
        if len(expected) != len(shape):
            raise EngineError(f"step {step}: {name} has shape {shape}, expected {expected}")
        for want, have in zip(expected, shape, strict=True):
            if isinstance(want, int):
                if want != have:
                    raise EngineError(f"step {step}: {name} has shape {shape}, expected {expected}")
            elif dims.setdefault(want, have) != have:
                raise EngineError(f"step {step}: {name} has {want}={have}, but {origin[want]} has {want}={dims[want]}")
            origin.setdefault(str(want), name)
    return dims
