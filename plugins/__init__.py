"""The operations both sides share, one folder each: formula, plain reference, graph body, kernels, compiler adapters.

Imports no other twostroke package. `import twostroke.plugins` itself imports neither torch nor onnx.
"""
