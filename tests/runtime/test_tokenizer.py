from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from twostroke.engines.errors import EngineError
from twostroke.runtime.tokenizer import Tokenizer
from twostroke.tests.runtime.byte_level_tokenizer import BOS, EOS, THINK, USER, write_tokenizer


@pytest.mark.parametrize("add_bos", ["template", "config"])
def test_a_prompt_opens_with_one_begin_of_text_whoever_asks_for_it(tmp_path: Path, add_bos: str) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, add_bos=add_bos))
    ids = tokenizer.encode("the end")
    assert ids[0] == 0
    assert 0 not in ids[1:]
    assert tokenizer.encode("the end", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "the end"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BOS}the end"


def test_no_begin_of_text_where_nobody_asks_for_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, add_bos="never"))
    assert 0 not in tokenizer.encode("the end")


@pytest.mark.parametrize("add_bos", ["template", "never"])
def test_ids_equal_those_of_transformers(tmp_path: Path, add_bos: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, add_bos=add_bos)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(folder)
    for text in ("the end", "naïve 😀", f"{USER}hello{THINK}", " "):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_control_tokens_are_special_and_added_text_is_not(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    names = {name: tokenizer.encode(name, add_special_tokens=False)[0] for name in (BOS, EOS, USER, THINK)}
    assert tokenizer.special_ids == {names[BOS], names[EOS], names[USER]}
    assert tokenizer.token_bytes(names[USER]) == b""
    assert tokenizer.token_bytes(names[USER], skip_special_tokens=False) == USER.encode()
    assert tokenizer.token_bytes(names[THINK]) == THINK.encode()


def test_an_id_beyond_the_tokenizer_has_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_a_missing_tokenizer_names_the_file_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json does not exist.*token ids"):
        Tokenizer(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    RawTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(EngineError, match="decoder is NoneType, expected ByteLevel"):
        Tokenizer(tmp_path)


def test_a_begin_of_text_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    with pytest.raises(EngineError, match=r"bos_token is '<s>', which tokenizer\.json does not have"):
        Tokenizer(tmp_path)
