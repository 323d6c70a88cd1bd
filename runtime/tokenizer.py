"""Text to token ids and back, over the `tokenizer.json` of an engine directory.

Byte-level tokenizers only: there every token is a fixed run of bytes, so text can be put together token by token and
nothing is decoded twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from twostroke.engines.errors import EngineError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet (GPT-2, Radford et al. 2019): printable bytes are written as themselves, the others, in
    order, as the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class Tokenizer:
    """The tokenizer of a folder."""

    def __init__(self, folder: str | Path) -> None:
        """EngineError if the folder has no tokenizer, or one that is not byte-level."""
        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise EngineError(
                f"{path} does not exist, and text needs it; put the checkpoint's {TOKENIZER_FILE} there, or give "
                "prompts as token ids"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise EngineError(f"{path} cannot be read as a tokenizer ({error})") from None
        decoder = self._tokenizer.decoder
        if not isinstance(decoder, tokenizers.decoders.ByteLevel):
            raise EngineError(f"{path}: decoder is {type(decoder).__name__}, expected ByteLevel")
        self._special = {
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._bytes: dict[int, bytes] = {}
        self._byte_of_character = _byte_of_character()
        self._opening = self._begin_of_text(Path(folder) / TOKENIZER_CONFIG_FILE)

    def _begin_of_text(self, path: Path) -> list[int]:
        """Begin of text, where the configuration rather than the tokenizer asks for it."""
        try:
            config: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise EngineError(f"{path} cannot be read ({error})") from None
        token = config.get("bos_token")
        name = token.get("content") if isinstance(token, dict) else token
        if not config.get("add_bos_token") or name is None:
            return []
        token_id = self._tokenizer.token_to_id(name)
        if token_id is None:
            raise EngineError(f"{path}: bos_token is {name!r}, which {TOKENIZER_FILE} does not have")
        return [token_id]

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens, which `skip_special_tokens` keeps out of the text."""
        return frozenset(self._special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, opened by begin of text if the tokenizer asks for it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._opening and ids[:1] != self._opening:
            return self._opening + ids
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of all ids at once; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token adds to the text; none for an id the tokenizer does not have."""
        if skip_special_tokens and token_id in self._special:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            alphabet = self._byte_of_character
            spelled = all(character in alphabet for character in token)
            known = bytes(alphabet[character] for character in token) if spelled else token.encode()
            self._bytes[token_id] = known
        return known
