"""Names that libraries keep private and the suite uses all the same: every one is listed here, and is there in the installed version.

Remove a line when the suite no longer needs its name. A new one wants a reason in a comment where it is used.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = ("os._exit",)  # documented, for processes that were forked

KNOWN = {
    "attention/_route.py": [
        "transformers:PretrainedConfig._attn_implementation",
    ],
    "cluster/access.py": [
        "ray._private.ray_constants",
        "ray._private.services",
        "ray._private.authentication.authentication_token_setup"
        ".maybe_enable_token_auth_if_token_available",
    ],
    "cluster/session.py": [
        "ray._private.services",
        "ray._private.state.state",
        "ray._private.worker",
    ],
    "meters/memory.py": [
        "torch.utils._python_dispatch.TorchDispatchMode",
    ],
    "metrics/text.py": [
        "sacrebleu.metrics:BLEU._extract_corpus_statistics",
    ],
    "profiling/arms.py": [
        "torch.utils._python_dispatch.TorchDispatchMode",
    ],
    "profiling/estimate.py": ["torch._subclasses.fake_tensor.FakeTensorMode"],
    "train/engine.py": [
        "torch.nn:Module._forward_hooks",
        "torch.nn:Module._forward_pre_hooks",
    ],
    "train/pieces.py": [
        "deepspeed.utils.tensor_fragment:_hp_mapping",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
        "._reassign_or_swap_out_partitioned_parameters",
    ],
    "tune/elastic.py": [
        "ray.tune.execution.tune_controller:TuneController._actor_cache",
    ],
}
"""By file: what it imports, `module.name`; and which attributes it reads, `module:owner.attribute`."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(path: Path) -> set[str]:
    """Imports as `module.name`, and `._attribute` for attributes of something that the file does not define."""
    tree = ast.parse(path.read_text())
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and is_self(node.value):
            own.add(node.attr)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("suite"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            if ast.unparse(node) not in PUBLIC:
                found.add(f".{node.attr}")
            continue
        else:
            continue
        found |= {name for name in names if any(map(is_private, name.split(".")))}
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def as_found(entry: str) -> str:
    """How `private_names` writes an entry of `KNOWN`."""
    module, _, attribute = entry.partition(":")
    return f".{attribute.rpartition('.')[2]}" if attribute else module


def test_every_private_name_of_a_library_is_listed() -> None:
    found = {}
    for path in sorted((ROOT / "suite").rglob("*.py")):
        names = private_names(path)
        if names:
            found[str(path.relative_to(ROOT / "suite"))] = names
    assert found == {file: set(map(as_found, entries)) for file, entries in KNOWN.items()}


@pytest.mark.parametrize("entry", sorted({entry for known in KNOWN.values() for entry in known}))
def test_the_installed_version_has_the_name(entry: str) -> None:
    module_name, _, attribute = entry.partition(":")
    if not attribute:
        module_name, _, attribute = entry.rpartition(".")
    found = importlib.import_module(module_name)
    *owners, name = attribute.split(".")
    for owner in owners:
        found = getattr(found, owner)
    if not hasattr(found, name):  # an instance's attribute: its class, or its module, names it
        assert name in inspect.getsource(found)
