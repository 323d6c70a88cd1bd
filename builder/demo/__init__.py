"""The demo model: a small DeepSeek-V4-shaped target with its DSpark draft, trained on the standard library's sources.

`python -m twostroke.builder.demo.train -o runtime/demo/v4-dspark` makes the folder; `whole_sequence` is also the
tests' independent oracle. Needs torch, tokenizers and safetensors. Nothing outside tests may import this package.
"""
