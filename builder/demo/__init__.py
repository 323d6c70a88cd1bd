"""The demo models, trained on the standard library's sources: a small DeepSeek-V4-shaped target with its DSpark draft
and a V3.2-shaped one with its MTP layer; `models` says what each is made of.

`python -m twostroke.builder.demo.train --model NAME -o runtime/demo/NAME` makes a folder; `whole_sequence` and
`whole_sequence_v32` are also the tests' independent oracles. Needs torch, tokenizers and safetensors. Nothing outside
tests may import this package.
"""
