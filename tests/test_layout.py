"""What an import may do, and what every file must say. Who may import whom: `lint-imports`."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from suite.attention import variants
from suite.data.generators import generators
from suite.petl import methods

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "suite").rglob("*.py"))
LOAD_NOTHING = ("config", "record", "storage", "stats", "plan", "leaderboard")
LOAD_RAY = ("tune", "cluster", "doctor")
PUBLISHED = (
    "suite",
    "tests",
    "tasks",
    "search_spaces",
    "sweeps",
    "benchmarks",
    "docs",
    "deploy",
    "tools",
    "notebooks",
    ".ci",
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_training_names_no_method_variant_or_task() -> None:
    names = {
        *methods.names(),
        *variants.names(),
        *(p.stem for p in (ROOT / "tasks").glob("*.yaml")),
    }
    names -= {"full", "read", "pretrained"}  # also plain words of the code
    for path in (ROOT / "suite" / "train").rglob("*.py"):
        tree = ast.parse(path.read_text())
        texts = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not texts & names, f"{relative(path)} names {texts & names}"


PROBE = """
import json, os, sys, threading
root = sys.argv[1]
reads = []
original = type(os.environ).__getitem__

def spy(self, key):
    frame = sys._getframe(1)
    for _ in range(3):  # os.environ.get and os.path.expanduser add frames of their own
        if frame is None:
            break
        if frame.f_code.co_filename.startswith(root) and frame.f_code.co_name == "<module>":
            reads.append(f"{frame.f_code.co_filename}:{frame.f_lineno} reads {key}")
        frame = frame.f_back
    return original(self, key)

type(os.environ).__getitem__ = spy
handlers = lambda: len(__import__("logging").getLogger().handlers)
found = {}
for name in sys.argv[2:]:
    before = set(sys.modules)
    __import__(name)
    heavy = {"ray", "torch", "mlflow", "deepspeed"} & (set(sys.modules) - before)
    if heavy:
        found[name] = sorted(heavy)
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
import torch
print(json.dumps({"heavy": found, "reads": reads, "threads": threading.active_count(), "children": children,
                  "handlers": handlers(), "distributed": torch.distributed.is_initialized()}))
"""


@pytest.mark.slow
def test_importing_any_module_does_nothing() -> None:
    """One fresh process imports every module, those first that may load the fewest libraries."""

    def stage(name: str) -> int:
        room = name.split(".")[1] if "." in name else ""
        if room in LOAD_NOTHING:
            return 0
        return 2 if room in LOAD_RAY else 1

    names = []
    for path in MODULES:
        module = relative(path).removesuffix(".py").removesuffix("/__init__")
        names.append(module.replace("/", "."))
    names.sort(key=lambda name: (stage(name), name))
    command = [sys.executable, "-c", PROBE, str(ROOT / "suite"), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    for name, libraries in seen["heavy"].items():
        allowed: tuple[set[str], ...] = (set(), {"torch"}, {"torch", "ray"})
        assert set(libraries) <= allowed[stage(name)], f"importing {name} loads {libraries}"
    assert seen["reads"] == []
    assert seen["threads"] == 1
    assert seen["children"] == []
    assert seen["handlers"] == 0
    assert seen["distributed"] is False
    assert done.stdout.count("\n") == 1, "an import printed something"


def plug_ins() -> list[type]:
    return [
        registry.get(name)
        for registry in (methods, variants, generators)
        for name in registry.names()
    ]  # type: ignore[attr-defined]


@pytest.mark.parametrize("plug_in", plug_ins(), ids=lambda cls: cls.__module__)
def test_a_plug_ins_file_says_where_it_comes_from(plug_in: type) -> None:
    docstring = sys.modules[plug_in.__module__].__doc__ or ""
    for heading in ("Source:", "Deviations:"):
        assert re.search(rf"^{heading}\s+\S", docstring, re.MULTILINE), (
            f"{plug_in.__module__} lacks {heading}"
        )


def test_all_seven_methods_are_there_with_a_search_space() -> None:
    seven = {"full", "lora", "prompt", "adapter", "bitfit", "lst", "read"}
    assert seven <= set(methods.names())
    assert seven <= {path.stem for path in (ROOT / "search_spaces").glob("*.yaml")}


def published_files() -> list[Path]:
    inside = [
        p
        for folder in PUBLISHED
        for p in (ROOT / folder).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    ]
    return inside + [p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"]


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    pattern = re.compile(
        r"(?<![\w.~])/(?:" + "|".join(("work", "root", r"home/\w+", r"Users/\w+")) + r")/"
    )
    for path in published_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        assert not (found := pattern.findall(text)), f"{relative(path)}: {found}"


def test_every_dependency_is_locked_to_one_version() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", line) for line in lines), (
        "pinned, without local version labels"
    )
    locked = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    names = {
        re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~! ]", item)[0]).lower() for item in wanted
    } - {project["name"]}
    assert names <= locked, f"not in constraints.txt: {names - locked}"
    assert "torch==2.13.0" in lines
