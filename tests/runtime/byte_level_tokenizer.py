"""A byte-level BPE with DeepSeek-like control tokens, trained on a few lines in a moment."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"
# Added, but ordinary text.
THINK = "<think>"
CORPUS = ["the end of the story\n", "def stop(self): return the_end\n", "naïve café, straße, 😀😀 und 漢字漢字\n"] * 4


def write_tokenizer(folder: Path, vocab_size: int = 320, add_bos: str = "template") -> Path:
    """Writes tokenizer.json and its config into `folder`. `add_bos`: by the "template", by the "config", or "never"."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(USER, special=True)])
    tokenizer.add_tokens([AddedToken(THINK, special=False)])
    if add_bos == "template":
        bos = (BOS, tokenizer.token_to_id(BOS))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": BOS},
        "eos_token": EOS,
        "add_bos_token": add_bos == "config",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
