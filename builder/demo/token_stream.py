"""Training modules as one stream of tokens, and random cuts of it."""

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from twostroke.builder.demo.shape import BOS, EOS


class TokenStream:
    """All modules one after the other, each closed by the end token, on `device`."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer, device: torch.device, seed: int) -> None:
        encoded = [encoding.ids[1:] for encoding in tokenizer.encode_batch(texts)]
        self.tokens = torch.tensor([token for ids in encoded for token in [*ids, EOS]], device=device)
        values = self.tokens.cpu().numpy()
        texts_of = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
        ends_line = np.array([text.endswith("\n") for text in texts_of])
        ends_line[EOS] = True
        opens = np.array([bool(text[:1].strip()) for text in texts_of])
        opens[: EOS + 1] = False
        # Top-level lines: a line end, then something that is not white space.
        starts = np.flatnonzero(ends_line[values[:-1]] & opens[values[1:]]) + 1
        self.line_starts = torch.from_numpy(starts).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def cuts(self, count: int, length: int, top_level_share: float = 0.5) -> Tensor:
        """[count, length]: the beginning token, then `length - 1` tokens from anywhere or from a top-level line."""
        device, limit = self.tokens.device, len(self.tokens) - length
        anywhere = torch.randint(limit, (count,), generator=self._generator, device=device)
        picks = torch.randint(len(self.line_starts), (count,), generator=self._generator, device=device)
        lines = self.line_starts[picks].clamp(max=limit)
        chance = torch.rand(count, generator=self._generator, device=device)
        start = torch.where(chance < top_level_share, lines, anywhere)
        body = self.tokens[start[:, None] + torch.arange(length - 1, device=device)]
        return torch.cat((torch.full((count, 1), BOS, device=device), body), 1)
