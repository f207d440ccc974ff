"""What must not appear in the package, read from its syntax trees. `SECURITY.md` says what that is for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quantkit"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: Modules that run code found in data, or reach for the network, processes or memory by themselves.
FORBIDDEN_IMPORTS = {
    *(
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "joblib",
        "marshal",
        "shelve",
        "code",
        "runpy",
        "imp",
        "ctypes",
    ),
    *("socket", "ssl", "http", "urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc"),
    *("subprocess", "multiprocessing", "pty", "zipimport", "pkgutil", "jinja2", "zipfile", "tarfile"),
}
#: Functions that do, by the last parts of their names.
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "globals"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
    *("np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("os.system", "os.popen", "os.execv", "os.execve", "os.spawnv", "os.umask", "os.chmod", "os.fchmod"),
    *("tempfile.mktemp", "importlib.reload", "util.spec_from_file_location", "util.module_from_spec"),
    *("torch.serialization.add_safe_globals",),
}

#: What is there all the same: file, what, and why that is safe.
ALLOWED: dict[tuple[str, str], str] = {
    (
        "__init__.py",
        "import_module of a name that is computed",
    ): "the modules of _LAZY, a table of quantkit's",
    ("__init__.py", "call globals"): "what was imported is kept in this module",
    ("checkpoint/output/lock.py", "import socket"): "the name of this host, for whoever waits for the lock",
    (
        "verification/verify.py",
        "import subprocess",
    ): "loads the model in a fresh Python, with a program of its own",
    ("bench/worker.py", "import subprocess"): "measures in a fresh Python, with a program of its own",
    ("kernels/jit/compile_worker.py", "import subprocess"): "a fresh Python, with a program of its own",
    ("kernels/jit/compile_worker.py", "import multiprocessing"): "talks to the processes that it starts",
    (
        "kernels/jit/compile_worker.py",
        "import multiprocessing.connection",
    ): "that is, through pipes of its own",
    (
        "kernels/jit/compile_worker.py",
        "import_module of a name that is computed",
    ): "modules of kernels, named by the process that started this one",
    (
        "kernels/tuning/gpu_bench.py",
        "import multiprocessing",
    ): "processes that compile, which it starts itself",
    (
        "kernels/tuning/gpu_bench.py",
        "import multiprocessing.connection",
    ): "talks to those processes and no others",
    ("runtime/cuda_graphs/refusals.py", "call globals"): "the refusals of this module, as one table",
    (
        "model/model_class.py",
        "getattr of transformers and a name that is computed",
    ): "checked to be a model class of transformers' own",
    (
        "kernels/gemm/operands.py",
        "getattr of tl and a name that is computed",
    ): "the name of a dtype of torch",
}


def dotted(node: ast.AST) -> str:
    """`a.b.c` for the expression of that form, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def offences(tree: ast.AST) -> Iterator[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            modules |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (f"import {name}" for name in names if name.partition(".")[0] in FORBIDDEN_IMPORTS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from of_call(node, modules)
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            yield "the text 'trust_remote_code'"


def of_call(node: ast.Call, modules: set[str]) -> Iterator[str]:
    name = dotted(node.func)
    for forbidden in FORBIDDEN_CALLS:
        # A method called `eval` or `compile` is another function.
        if name == forbidden or ("." in forbidden and name.endswith(f".{forbidden}")):
            yield f"call {forbidden}"
    first, second = (*node.args, None, None)[:2]
    if name.endswith("import_module") and not isinstance(first, ast.Constant):
        yield "import_module of a name that is computed"
    if name == "getattr" and dotted(first or node) in modules and not isinstance(second, ast.Constant):
        yield f"getattr of {dotted(first or node)} and a name that is computed"
    for keyword in node.keywords:
        literal = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
        if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and literal is not False:
            yield f"{keyword.arg} that is not False"
        if keyword.arg in ("weights_only", "use_safetensors") and literal is not True:
            yield f"{keyword.arg} that is not True"
    opens = name == "os.open" and "O_CREAT" in ast.dump(node)
    if opens and (len(node.args) < 3 or not is_plain_mode(node.args[2])):
        yield "a file made with a mode other than 0644"


def is_plain_mode(node: ast.expr) -> bool:
    return (isinstance(node, ast.Constant) and node.value == 0o644) or dotted(node) == "_FILE_MODE"


def found_in(path: Path) -> set[tuple[str, str]]:
    file = path.relative_to(PACKAGE).as_posix()
    return {(file, what) for what in offences(ast.parse(path.read_text(encoding="utf-8")))}


def test_nothing_runs_what_a_file_says_but_the_exceptions() -> None:
    """Exactly those, so that an exception goes with what it is for."""
    assert set().union(*map(found_in, MODULES)) == ALLOWED.keys()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from multiprocessing import Pool",
        "eval('1')",
        "__import__(name)",
        "import torch\ntorch.load(path)",
        "import importlib\nimportlib.import_module(name)",
        "import torch\ngetattr(torch, name)",
        "import torch.nn as nn\ngetattr(nn, config['kind'])",
        "AutoModel.from_pretrained(path, trust_remote_code=flag)",
        "AutoModel.from_pretrained(path, **{'trust_remote_code': True})",
        "np.load(path, allow_pickle=True)",
        "run(command, shell=True)",
        "import tempfile\ntempfile.mktemp()",
        "import os\nos.open(path, os.O_CREAT | os.O_RDWR, 0o666)",
        "import os\nos.open(path, os.O_CREAT | os.O_RDWR)",
        "import yaml\nyaml.load(text, Loader)",
    ],
)
def test_what_is_looked_for_is_found(code: str) -> None:
    assert list(offences(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "import re\nre.compile(pattern)",
        "getattr(self, name)",
        "import torch\ngetattr(torch, 'float32')",
        "load(path, trust_remote_code=False, use_safetensors=True)",
        "import os\nos.open(path, os.O_CREAT, 0o644)",
    ],
)
def test_what_is_harmless_is_left_alone(code: str) -> None:
    assert not list(offences(ast.parse(code)))
