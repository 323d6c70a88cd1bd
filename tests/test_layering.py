"""Who may import whom, read from the sources: `runtime -> engines -> plugins`, `builder -> engines, plugins`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "runtime": {"runtime", "engines", "plugins"},
    "engines": {"engines", "plugins"},
    "plugins": {"plugins"},
    "builder": {"builder", "engines", "plugins"},
}
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
# Where a package may be imported at all, as patterns of paths below the root.
FRAMEWORKS = {
    "torch": (
        *("builder/", "plugins/*.py", "plugins/*/reference.py", "plugins/*/torch_op.py", "plugins/nsa/index_keys.py"),
        "engines/inductor.py",
    ),
    "onnx": ("builder/", "plugins/*/onnx.py", "plugins/onnx_body.py"),
    "onnx_ir": ("builder/", "plugins/*/onnx.py", "plugins/onnx_body.py"),
    "onnxscript": ("builder/", "plugins/*/onnx.py", "plugins/onnx_body.py"),
    "safetensors": ("builder/",),
    "onnxruntime": ("engines/onnxruntime.py",),
    "tensorrt": ("engines/tensorrt.py", "plugins/*/tensorrt.py"),
    "transformers": (),
}


def imports(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Full names of everything a file imports, wherever in it."""
    package = ("twostroke", *path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str | None:
    """The layer a name of twostroke belongs to; None for other packages and for the package's own `__version__`."""
    parts = module.split(".")
    layered = parts[0] == "twostroke" and len(parts) > 1 and parts[1] in (*LAYERS, "tests", "__main__")
    return parts[1] if layered else None


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_layer_imports_only_layers_below_it(path: Path) -> None:
    allowed = LAYERS[path.relative_to(ROOT).parts[0]]
    wrong = {module for module in imports(path) if (layer := layer_of(module)) and layer not in allowed}
    assert not wrong, f"{name(path)} imports {', '.join(sorted(wrong))}; it may import {', '.join(sorted(allowed))}"


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_framework_is_imported_only_where_it_belongs(framework: str) -> None:
    places = FRAMEWORKS[framework]
    wrong = [
        name(path)
        for path in (*SOURCES, ROOT / "__init__.py", ROOT / "__main__.py")
        if any(module.split(".")[0] == framework for module in imports(path))
        and not any(
            name(path).startswith(place) if place.endswith("/") else path.relative_to(ROOT).match(place)
            for place in places
        )
    ]
    assert not wrong


def test_the_rules_see_relative_and_nested_imports(tmp_path: Path) -> None:
    source = tmp_path / "engines" / "x.py"
    source.parent.mkdir()
    source.write_text("from ..runtime import llm\ndef f():\n    import torch.nn\n")
    assert set(imports(source, tmp_path)) == {"twostroke.runtime.llm", "torch.nn"}
