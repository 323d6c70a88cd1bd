"""From an engine directory to tokens: state, iteration, speculation, scheduling, the `LLM` API and its front ends.

May import `engines` and `plugins`; never `builder`, torch, onnx or transformers.
"""
