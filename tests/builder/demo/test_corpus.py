"""The held-out text stays held out."""

import pytest
from tokenizers import Tokenizer

from twostroke.builder.demo import corpus
from twostroke.builder.demo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def texts() -> tuple[dict[str, str], dict[str, str]]:
    return corpus.split(corpus.stdlib_root())


@pytest.fixture(scope="module")
def tokenizer(texts: tuple[dict[str, str], dict[str, str]]) -> Tokenizer:
    return train_tokenizer(list(texts[0].values())[:60], 512)


def test_split_depends_on_the_name_alone() -> None:
    assert [name for name in ("json", "logging", "queue", "os", "typing", "ast") if corpus.held_out(name)] == [
        "json",
        "logging",
        "queue",
    ]


def test_no_module_is_on_both_sides(texts: tuple[dict[str, str], dict[str, str]]) -> None:
    training, held = texts
    assert not set(training) & set(held)
    assert not any(corpus.held_out(name) for name in training)
    assert all(corpus.held_out(name) for name in held)


def test_tests_and_site_packages_are_left_out(texts: tuple[dict[str, str], dict[str, str]]) -> None:
    names = set(texts[0]) | set(texts[1])
    assert "argparse" in names
    assert not any(part in name.split(".") for name in names for part in ("test", "tests", "site-packages"))


def test_prompts_come_from_held_out_modules_only_and_repeat(
    texts: tuple[dict[str, str], dict[str, str]], tokenizer: Tokenizer
) -> None:
    held = texts[1]
    prompts = corpus.prompts(held, tokenizer, 20)
    assert prompts == corpus.prompts(held, tokenizer, 20)
    for prompt in prompts:
        lines = held[prompt.module].split("\n")
        assert "\n".join(lines[prompt.line :]).startswith(prompt.text)
        assert 96 <= len(prompt.token_ids) <= 224
        assert prompt.token_ids[0] == 0


def test_encoding_comes_back_as_the_same_text(
    texts: tuple[dict[str, str], dict[str, str]], tokenizer: Tokenizer
) -> None:
    text = texts[1]["queue"] + "\té€\U0001f600\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_too_few_prompts_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="only 0 prompts"):
        corpus.prompts({"m": "x = 1\n"}, tokenizer, 1)
