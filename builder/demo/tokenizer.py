"""Byte-level BPE with DeepSeek's special tokens; encoding puts the beginning-of-sentence token first."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from twostroke.builder.demo.checkpoint import BOS_TEXT, EOS_TEXT, NOISE_TEXT
from twostroke.builder.demo.shape import BOS


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (BOS_TEXT, EOS_TEXT, NOISE_TEXT)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS_TEXT} $A", special_tokens=[(BOS_TEXT, BOS)])
    return tokenizer
