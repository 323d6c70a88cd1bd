"""twostroke: speculative decoding for DeepSeek models on compiled engines.

`LLM` and `SamplingParams` are loaded on first use, so that `import twostroke` costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from twostroke.runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from twostroke.runtime.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'twostroke' has no attribute {name!r}")
