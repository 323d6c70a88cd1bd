"""From a checkpoint on disk to an engine directory: configs, readers, networks, export, lint, the demo recipe.

May import `engines`, `plugins`, torch and onnx. The runtime never imports this package, and nothing here serves a
request.
"""
