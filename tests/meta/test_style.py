"""House rules that a machine can check: sizes, names, layers, docstrings, no pickle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"mutualrl": 3, "agents": 2, "federated": 2, "exchange": 1, "tokenalign": 1}
FREE_OF_TORCH = ("exchange", "tokenalign", "federated")
CODE = sorted(path for package in FLOORS for path in (ROOT / package).rglob("*.py"))
ALL = CODE + sorted(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

MOST_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes(path) if isinstance(node, Function))


def imported(path: Path) -> set[str]:
    """Top names of everything that a file imports, wherever in the file."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def where(path: Path, node: Function | None = None) -> str:
    return f"{path.relative_to(ROOT)}" + ("" if node is None else f":{node.lineno} {node.name}")


def test_there_is_code_to_check() -> None:
    assert len(CODE) > 30
    assert {path.relative_to(ROOT).parts[0] for path in CODE} >= set(FLOORS) - {"federated"}


def test_no_file_is_too_long() -> None:
    lines = {where(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL}
    assert {path: count for path, count in lines.items() if count >= MOST_LINES} == {}


def test_no_function_is_too_long() -> None:
    lines = {where(path, node): (node.end_lineno or 0) - node.lineno + 1 for path in ALL for node in functions(path)}
    assert {path: count for path, count in lines.items() if count >= MOST_FUNCTION_LINES} == {}


def test_no_function_takes_too_many_parameters() -> None:
    def count(arguments: ast.arguments) -> int:
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return len([argument for argument in named if argument.arg not in ("self", "cls")])

    counts = {where(path, node): count(node.args) for path in ALL for node in functions(path)}
    assert {path: parameters for path, parameters in counts.items() if parameters > MOST_PARAMETERS} == {}


def test_benchmarks_import_the_packages_whose_names_they_have() -> None:
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"]
    mended = "path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))"
    assert [where(path) for path in scripts if mended not in path.read_text(encoding="utf-8")] == []


def test_every_module_says_by_its_name_what_is_in_it() -> None:
    assert [where(path) for path in ALL if path.stem in EMPTY_NAMES] == []


def test_every_public_thing_has_a_docstring() -> None:
    missing = []
    for path in CODE:
        module = tree(path)
        public = [node for node in module.body if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")]
        missing += [f"{where(path)} {node.name}" for node in public if ast.get_docstring(node) is None]
        if ast.get_docstring(module) is None:
            missing.append(where(path))
    assert missing == []


def test_packages_import_only_from_lower_floors() -> None:
    def allowed(own: str, name: str) -> bool:
        return own == name or (FLOORS[name] < FLOORS[own] and (own, name) != ("federated", "tokenalign"))

    imports = [(path, name) for path in CODE for name in imported(path) & set(FLOORS)]
    assert [f"{where(path)}: {name}" for path, name in imports if not allowed(path.relative_to(ROOT).parts[0], name)] == []


@pytest.mark.parametrize("package", FREE_OF_TORCH)
def test_the_lower_packages_are_free_of_torch_and_pickle(package: str) -> None:
    forbidden = {"torch", "transformers", "pickle", "cloudpickle", "dill", "marshal", "shelve"}
    found = {where(path): imported(path) & forbidden for path in CODE if path.relative_to(ROOT).parts[0] == package}
    assert {path: names for path, names in found.items() if names} == {}


def test_nothing_here_runs_what_it_loads() -> None:
    """No pickle in any package; NumPy and torch are told to load plain data, wherever they load."""
    picklers = {where(path): imported(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"} for path in CODE}
    assert {path: names for path, names in picklers.items() if names} == {}
    careless = []
    for path in CODE:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                plain = {"np.load": ("allow_pickle", False), "torch.load": ("weights_only", True)}
                name = f"{node.func.value.id}.{node.func.attr}"
                given = {(word.arg, word.value.value) for word in node.keywords if isinstance(word.value, ast.Constant)}
                if name in plain and plain[name] not in given:
                    careless.append(f"{where(path)}:{node.lineno}")
    assert careless == []


def test_configs_and_the_lower_packages_load_without_what_is_heavy() -> None:
    script = (
        "import sys, exchange, tokenalign, federated, mutualrl.config, mutualrl.load, mutualrl.validate\n"
        "heavy = {'torch', 'transformers', 'networkx', 'matplotlib', 'datasets', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
