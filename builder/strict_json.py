"""JSON files from outside, read strictly: one object, unique keys, no NaN, bounded size, every failure one sentence.

The standard reader keeps the last of two equal keys, accepts NaN and raises RecursionError on deep nesting. A
checkpoint that does any of this is damaged or hostile; guessing what was meant would change weights silently.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from twostroke.engines.errors import ConfigError, TwostrokeError

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlong = 40
_REPR.maxlist = _REPR.maxtuple = 12


def shown(value: object) -> str:
    """A value from a file as it may stand in an error message: bounded in length and depth."""
    return _REPR.repr(value)


def named(text: str) -> str:
    """A name from a file as it may stand in an error message: as it is, unless long or not printable."""
    return text if text.isprintable() and len(text) <= 200 else shown(text)


def shown_list(names: Iterable[str], limit: int = 20) -> str:
    """Up to `limit` names, comma separated, and how many more there are."""
    listed = list(names)
    rest = f" and {len(listed) - limit:,} more" if len(listed) > limit else ""
    return ", ".join(map(named, listed[:limit])) + rest


def parse_json_object(data: bytes, where: str, error: type[TwostrokeError]) -> dict[str, Any]:
    """`data` as one JSON object. Raises `error`, naming `where`, for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise error(f"{where}: the key {shown(twice)} occurs more than once in one object; each may occur once")
        return result

    def no_constant(text: str) -> Any:
        raise error(f"{where}: {text} is not JSON; only finite numbers are accepted")

    if not data.strip():
        raise error(f"{where} is empty ({len(data)} bytes); expected a JSON object")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError:
        raise error(f"{where}: JSON nested too deeply to be what it claims to be") from None
    except ValueError as reason:  # malformed JSON, not UTF-8, or a number of thousands of digits
        raise error(f"{where} is not JSON: {named(str(reason))}") from None
    if not isinstance(value, dict):
        raise error(f"{where} holds {shown(value)}; expected a JSON object")
    return value


def read_json_object(path: Path, error: type[TwostrokeError], limit: int = 1 << 28) -> dict[str, Any]:
    """The JSON object in the file `path` of at most `limit` bytes. Raises `error` for every way this can fail."""
    try:
        if path.is_dir():
            raise error(f"{path} is a folder; expected a JSON file")
        if not path.exists():
            raise error(f"{path} does not exist")
        if not path.is_file():
            raise error(f"{path} is not a regular file")
        size = path.stat().st_size
        if size > limit:
            raise error(f"{path} has {size:,} bytes; at most {limit:,} are accepted for this file")
        data = path.read_bytes()
    except (OSError, ValueError) as reason:  # no permission, link loop, name too long, NUL in the name
        raise error(f"{named(str(path))} cannot be read: {getattr(reason, 'strerror', None) or reason}") from None
    return parse_json_object(data, str(path), error)


class Fields:
    """The fields of one JSON object, and a ledger of which were read.

    `where` names the file and `prefix` the object inside it. Every refusal is a ConfigError with file, field, value
    found and what is accepted; `check_all_taken` refuses the fields nobody read.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix
        self.taken: set[str] = set()

    def refused(self, name: str, found: object, accepted: str) -> ConfigError:
        return ConfigError(f"{self.where}: field {self.prefix}{name} is {shown(found)}; {accepted}")

    def missing(self, name: str) -> ConfigError:
        return ConfigError(f"{self.where}: field {self.prefix}{name} is missing; there is no default for it")

    def take(self, name: str, default: Any = ...) -> Any:
        self.taken.add(name)
        if name in self.values:
            return self.values[name]
        if default is ...:
            raise self.missing(name)
        return default

    def integer(self, name: str, low: int, high: int, default: Any = ...) -> int:
        return self.as_integer(name, self.take(name, default), low, high)

    def as_integer(self, name: str, found: object, low: int, high: int) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
            raise self.refused(name, found, f"expected an integer from {low} to {high}")
        return found

    def integers(self, name: str, found: object, low: int, high: int) -> tuple[int, ...]:
        if not isinstance(found, list) or not found:
            raise self.refused(name, found, f"expected a list of integers from {low} to {high}")
        return tuple(self.as_integer(f"{name}[{i}]", item, low, high) for i, item in enumerate(found))

    def boolean(self, name: str, default: Any = ...) -> bool:
        found = self.take(name, default)
        if not isinstance(found, bool):
            raise self.refused(name, found, "expected true or false")
        return found

    def positive(self, name: str, default: Any = ...) -> float:
        found = self.take(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 1e-30 < found < 1e30:
            raise self.refused(name, found, "expected a positive number between 1e-30 and 1e30")
        return float(found)

    def check_all_taken(self, harmless: Collection[str] = ()) -> None:
        known = self.taken.union(harmless)
        unknown = sorted(self.values.keys() - known)
        if not unknown:
            return
        near = difflib.get_close_matches(unknown[0][:200], known, n=1)
        hint = f" (is {named(unknown[0])} meant to be {near[0]}?)" if near else ""
        listed = shown_list(f"{self.prefix}{named(name)} = {shown(self.values[name])}" for name in unknown)
        raise ConfigError(
            f"{self.where}: not understood: {listed}{hint}; a field that may change the result is never ignored, so"
            " remove it if it does not"
        )
