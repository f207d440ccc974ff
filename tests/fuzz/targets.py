"""What is fuzzed: seeds, how they are mutated, and what must hold for whatever comes of it.

A check raises `QuantkitError` for input that it refuses and returns for input that is valid. Whatever else
it raises is a finding: also an `AssertionError` where the result is not that of a straightforward reading.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import safetensors
import torch
from safetensors.torch import save

from quantkit.calibrate.data.documents import read_documents
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify_files
from quantkit.checkpoint.model_record import LayerRecord, ModelRecord
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.safetensors_header import parse_json, read_header, read_json
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.kernels.linear import linear
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
from quantkit.kernels.registry import KERNELS, kernel_named
from quantkit.kernels.tuning.tile_table import Entry, Key, OtherTable, TileTable, from_json, gpu_in, to_json
from quantkit.packing.formats import CodebookFormat, FloatFormat, IntFormat
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, parse_token, scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.recipes.recipe import Choice, Recipe, read_recipe
from quantkit.verification.prompt_logits import TOLERANCE, PromptLogits, differences

from .converted import check_convert, low_bit_models, mutate_low_bit_model
from .decode import decode, largest_term
from .files import packed_parts, write_items
from .gguf_headers import check_gguf, gguf_headers, mutate_gguf
from .hub import check_hub, hub_cases, mutate_hub
from .low_bit import check_low_bit, low_bit_checkpoints, mutate_low_bit
from .models import (
    check_generation,
    check_load,
    check_structure,
    check_tokenizer,
    dense_checkpoints,
    generation_configs,
    packed_checkpoints,
    tokenizers,
)
from .mutate import (
    Item,
    Link,
    Odd,
    Pairs,
    dump,
    mutate_bytes,
    mutate_directory,
    mutate_json,
    mutate_safetensors,
    mutate_tree,
    pack_directory,
    parse,
    unpack_directory,
)
from .names import NAMES, check_name, mutate_name
from .ours import (
    Ignored,
    check_journal,
    check_partial,
    check_sensitivities,
    journals,
    partials,
    sensitivities,
)
from .pictures import check_pictures, mutate_pictures, pictures


@dataclass(frozen=True)
class Target:
    """One reader under test. `seconds` bound a case, `share` is its part of a long run."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    mutate: Callable[[bytes, Random], bytes]
    check: Callable[[bytes, Path], None]
    share: float
    seconds: float = 2.0


# Headers and JSON


@cache
def _small_file() -> bytes:
    return save(
        {
            "model.a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
            "model.b.bias": torch.ones(5, dtype=torch.bfloat16),
            "model.c": torch.zeros(1, 2, 3, dtype=torch.int64),
            "scalar": torch.tensor(True),
        },
        {"format": "pt"},
    )


def _deserialized(data: bytes) -> list[tuple[str, Any]]:
    """What the library reads."""
    try:
        return list(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        # The only header that quantkit takes and the library does not: JSON has a -0, which is 0.
        assert "floating point `-0.0`" in str(error), error
        return list(safetensors.deserialize(re.sub(rb"-0(?![.0-9])", b" 0", data)))


def _check_header(case: bytes, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(case)
    found = read_header(path)
    expected = dict(_deserialized(case))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        other = expected[name]
        assert (tensor.dtype, list(tensor.shape)) == (other["dtype"], other["shape"]), name
        assert case[tensor.offset : tensor.offset + tensor.nbytes] == bytes(other["data"]), name


def _check_json(case: bytes, directory: Path) -> None:
    found = parse_json(case, "the file")
    json.dumps(found, ensure_ascii=False).encode()
    # NaN is not itself, but looks like itself.
    assert repr(found) == repr(json.loads(case.decode("utf-8")))
    stack: list[Any] = [parse(case)]
    while stack:
        node = stack.pop()
        if isinstance(node, Pairs):
            assert len(dict(node)) == len(node), "a key was lost"
            stack += [value for _, value in node]
        elif isinstance(node, list):
            stack += node


_JSON = (
    b'{"a": 1, "b": [1.5, null, true, "x"], "c": {"d": {"e": []}, "f": "\\u00e9"}}',
    b'{"weight_map": {"model.a.weight": "model-00001-of-00002.safetensors"}, "metadata": {"total_size": 48}}',
)


# Directories of checkpoints

_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "text_config": {"a": [1]},
}


@cache
def _checkpoints() -> tuple[bytes, ...]:
    one = save(
        {"model.a.weight": torch.arange(12.0).view(3, 4), "model.b.bias": torch.ones(5, dtype=torch.bfloat16)}
    )
    two = save({"model.c.weight": torch.zeros(2, 3, dtype=torch.int32), "flags": torch.tensor([True, False])})
    names = {"model.a.weight": 1, "model.b.bias": 1, "model.c.weight": 2, "flags": 2}
    shards = {name: f"model-0000{i}-of-00002.safetensors" for name, i in names.items()}
    index = json.dumps({"metadata": {"total_size": 84}, "weight_map": shards}).encode()
    config = json.dumps(_CONFIG).encode()
    side: dict[str, Item] = {"tokenizer.json": b"{}", "LICENSE": b"free"}
    many: dict[str, Item] = {
        "config.json": config,
        "model.safetensors.index.json": index,
        "model-00001-of-00002.safetensors": one,
        "model-00002-of-00002.safetensors": two,
    }
    return pack_directory({"config.json": config, "model.safetensors": one, **side}), pack_directory(many)


def _check_checkpoint(case: bytes, directory: Path) -> None:
    write_items(directory, unpack_directory(case))
    checkpoint = Checkpoint.open(directory)
    checkpoint.fingerprint()
    checkpoint.check_unchanged()
    expected = [entry for shard in checkpoint.shards for entry in _deserialized(shard.read_bytes())]
    assert len(expected) == len(checkpoint.tensors) == len(dict(expected))
    for name, other in expected:
        tensor = checkpoint.read(name)
        assert list(tensor.shape) == other["shape"]
        assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == bytes(other["data"])
    for path in (*checkpoint.shards, *checkpoint.side_files):
        assert os.path.realpath(path).startswith(os.path.realpath(directory) + os.sep)


# Schemes and quantization_config

_CUSTOM = (
    Scheme(CodebookFormat("mine-three", 2, book=(-1.0, 0.5, 2.0)), 32),
    Scheme(FloatFormat("e3m1", 5, 3, 1, 3), 16, scale_dtype=torch.float16),
    Scheme(IntFormat("mine-int5", 5), 24, "integer"),
    scheme("ternary", group_size=16, packing="radix"),
    scheme("int5", group_size=16, packing="stream"),
    scheme("int8", group_size="tensor"),
    replace(scheme("fp8"), group_size=16, group_rows=16),
    scheme("int3", group_size=8, zero_point="float", scale_dtype=torch.float8_e4m3fn),
    scheme("int4", group_size=32, zero_point="minimum", scale_dtype=torch.float16),
)
_SCHEMES = (*(scheme(name) for name in PRESETS), *_CUSTOM)


@cache
def _configs() -> tuple[bytes, ...]:
    seeds = []
    for i, one in enumerate(_SCHEMES):
        modules = {"lm_head": None, "model.layers.0.mlp.down_proj": _SCHEMES[(i + 1) % len(_SCHEMES)]}
        seeds.append(json.dumps(QuantizationConfig("quantkit", one, modules).to_dict()).encode())
    return tuple(seeds)


def _check_config(case: bytes, directory: Path) -> None:
    data = parse_json(case, "the file")
    config = QuantizationConfig.from_dict(data)
    section = data["quantkit"]
    assert config.modules.keys() == section["modules"].keys()
    for name, number in {"": section["default"], **section["modules"]}.items():
        found = config.default if name == "" and "" not in config.modules else config.scheme_of(name)
        if number is None:
            assert found is None
            continue
        assert found is not None
        said, written = section["schemes"][number], found.to_dict()
        assert {k: v for k, v in written.items() if k != "format"} == {
            k: v for k, v in said.items() if k != "format"
        }
        assert parse_token(found.token) == found == Scheme.from_dict(json.loads(found.token))
        assert str(found)
        for rows, columns in ((1, 1), (33, 70)):
            _check_shapes(found, rows, columns)
    again = QuantizationConfig("quantkit", config.default, config.modules)
    assert QuantizationConfig.from_dict(json.loads(json.dumps(again.to_dict()))) == again


def _check_shapes(one: Scheme, rows: int, columns: int) -> None:
    shapes = one.storage_shapes((rows, columns))
    size = one.group_size if isinstance(one.group_size, int) else columns
    groups = math.ceil(columns / size)
    blocks = math.ceil(rows / one.group_rows)
    assert shapes["scale"][1] == ((1,) if one.group_size == "tensor" else (blocks, groups * one.planes))
    assert one.words_per_row(columns) * 32 >= columns * (1 if one.packing == "radix" else one.code_bits)
    assert one.pack(torch.zeros(rows, columns, dtype=torch.uint8)).shape == shapes["packed"][1]
    assert len(one.format.values) == 2**one.format.bits


# Manifests


@cache
def _manifests() -> tuple[bytes, ...]:
    files = {"config.json": b"{}", "model.safetensors": _small_file()}
    layers = {
        "model.layers.0.mlp.down_proj": LayerRecord(
            "linear", (4, 8), 1, "int4 g32 bfloat16", "mse", 4.5, 0.01, "default"
        ),
        "model.layers.0.mlp.experts.gate_up_proj": LayerRecord(
            "experts",
            (4, 8),
            2,
            "int4 g32 bfloat16",
            "best",
            4.5,
            0.01,
            "rule",
            0.1,
            0.01,
            "a note",
            (3, 0),
            (0.5, 0.25),
        ),
        "lm_head": LayerRecord("lm_head", (6, 4), 1, None, None, None, None, "kept"),
    }
    record = ModelRecord(
        "source", 100, "quantkit", ("experts",), {"linears": 4.5, "model": 6.0}, {"quantkit": "0.1.0"},
        Recipe().to_dict(), layers, {"model.norm.weight": "a norm"}, 0, "a text",
        relative_paths={"a": "../a"},
    )  # fmt: skip
    manifest = {
        "files": {n: {"sha256": hashlib.sha256(d).hexdigest(), "size": len(d)} for n, d in files.items()},
        "run_sha256": "0" * 64,
        "prompt_logits": {"prompt": [1, 2], "tokens": [[3, 4], [5, 6]], "logits": [[2.5, 1.0], [0.5, -1.0]]},
        **record.to_dict(),
    }
    return (pack_directory({MANIFEST_NAME: json.dumps(manifest).encode(), **files}),)


def _check_manifest(case: bytes, directory: Path) -> None:
    write_items(directory, unpack_directory(case))
    manifest = read_manifest(directory)
    reported = {problem.file for problem in verify_files(directory, manifest)}
    for name, entry in manifest["files"].items():
        path = directory / name
        whole = path.is_file() and os.path.realpath(path).startswith(os.path.realpath(directory) + os.sep)
        data = path.read_bytes() if whole else b""
        right = whole and (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"])
        assert right == (name not in reported), name
    record = ModelRecord.from_manifest(manifest)
    again = json.loads(json.dumps(record.to_dict()))
    assert ModelRecord.from_manifest(again) == record
    for measured in record.measured.values():
        assert measured.relative_error >= 0
    stored = PromptLogits.from_manifest(manifest)
    if stored is not None and len(stored.prompt) < 1000:
        _check_differences(stored)


def _check_differences(stored: PromptLogits) -> None:
    logits = torch.zeros(len(stored.prompt), 8)
    for row, tokens, values in zip(logits, ((3, 4), (5, 6)), ((2.5, 1.0), (0.5, -1.0)), strict=False):
        row[:] = -2
        row[torch.tensor(tokens)] = torch.tensor(values)
    if differences(stored, logits):
        return
    most = max(abs(x) for row in stored.logits for x in row)
    assert math.isfinite(most) and most <= torch.finfo(torch.float32).max
    for row, tokens, values in zip(logits.tolist(), stored.tokens, stored.logits, strict=True):
        found = [row[token] for token in tokens]
        assert all(abs(a - b) <= 1.01 * TOLERANCE * most for a, b in zip(found, values, strict=True))


# Packed tensors


@cache
def _packed() -> tuple[bytes, ...]:
    seeds = []
    for i, one in enumerate(_SCHEMES):
        shape = ((3, 70), (16, 64), (1, 33))[i % 3]
        fitting = one.for_columns(shape[1])
        parts = {name: part for name, part in packed_parts(fitting, shape, i).items() if name != "shape"}
        said = json.dumps({"scheme": fitting.to_dict(), "shape": list(shape)}).encode()
        seeds.append(pack_directory({"scheme.json": said, "parts.safetensors": save(parts)}))
    return tuple(seeds)


#: Larger matrices are refused or not, but their weights are not compared one by one.
_COMPARED = 1 << 12


def _check_packed(case: bytes, directory: Path) -> None:
    # The two names are ours, so no link stands for either.
    items = unpack_directory(case).items()
    write_items(directory, {name: item for name, item in items if not isinstance(item, Link)})
    said = read_json(directory / "scheme.json")
    one, shape = Scheme.from_dict(said.get("scheme", {})), said.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int for n in shape):
        return  # shapes come from the model, as integers
    checkpoint = Checkpoint.of_files([directory / "parts.safetensors"])
    parts = {name: checkpoint.read(name) for name in checkpoint.tensors}
    packed = PackedTensor.from_parts(parts, one, (shape[0], shape[1]))
    if shape[0] * shape[1] > _COMPARED:
        return
    expected, sizes = decode(parts, one, packed.shape)
    found = packed.dequantize()
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.float().isnan()), (
        "a NaN that the bytes do not say, or none where they do"
    )
    close = (found.double() - expected).abs() <= sizes * 2.0**-21 + 1e-37
    assert bool((close | (found.double() == expected.float().double()) | ~found.isfinite()).all())
    if bool(expected.isfinite().all()) and float(sizes.max()) < 1e37:
        assert bool(found.isfinite().all())
    _check_linear(packed, parts, found, expected)


def _check_linear(
    packed: PackedTensor, parts: dict[str, torch.Tensor], weights: torch.Tensor, exact: torch.Tensor
) -> None:
    """Compare products with `weights`, which may be infinite where `exact`, in float64, are numbers."""
    rows, columns = packed.shape
    generator = torch.Generator().manual_seed(rows * 131 + columns)
    x = torch.randn(3, columns, generator=generator)
    x[1, columns // 2] = (math.nan, math.inf, -math.inf)[rows % 3]
    largest = largest_term(parts, packed.scheme) * columns * 8
    lost = ~x.isfinite().all(1)[:, None] | ~weights.isfinite().all(1)[None, :]
    none = ~x.isfinite().all(1)[:, None] | ~exact.isfinite().all(1)[None, :]
    for dtype, most, error in ((torch.float32, 1e37, 2.0**-18), (torch.bfloat16, 1e37, 2.0**-5)):
        y = linear(x.to(dtype), packed)
        assert y.dtype == dtype
        assert bool((~y.isfinite())[none].all()), "a number where an input or a weight is none"
        if largest < most:
            rounded = x.to(dtype).double().nan_to_num(0, 0, 0)
            expected = rounded @ weights.double().nan_to_num(0, 0, 0).T
            size = rounded.abs() @ weights.double().abs().nan_to_num(0, 0, 0).T
            kept = ~lost
            assert bool(y.isfinite()[kept].all()), "no number where all inputs and weights are"
            assert bool(((y.double() - expected).abs() <= error * size + 1e-30)[kept].all()), (
                "a wrong product"
            )


# Tuning tables

GPU = Gpu("Test GPU 3000", (9, 0), 132, 227 << 10)


def _problem(name: str, m: int, n: int, k: int) -> Problem:
    return Problem(m, n, k, scheme(name), torch.bfloat16, "cuda", GPU_FEATURES, None, GPU)


def _table(shapes: Sequence[tuple[int, int]], formats: Sequence[str]) -> bytes:
    entries: dict[Key, Entry] = {}
    for name in formats:
        for n, k in shapes:
            for m, row in ((1, "fused-portable-gemv"), (16, "fused-portable"), (64, "dequantize")):
                problem, tile_space = _problem(name, m, n, k), kernel_named(row).tile_space
                tile = None if tile_space is None else tile_space.rule(problem)
                others = {} if row == "fused-portable-gemv" else {"fused-portable-gemv": 31.5}
                entries[Key.of(problem)] = Entry(12.5, row, tile, others)
    return to_json(TileTable(GPU, {"quantkit": "0.1.0", "triton": "3.6.0"}, entries), KERNELS)


@cache
def _tables() -> tuple[bytes, ...]:
    return _table(((4096, 4096), (4096, 14336)), ("int4", "nvfp4")), _table(((64, 128),), ("int7",))


def _check_table(case: bytes, directory: Path) -> None:
    try:
        gpu_in(case)
        table = from_json(case, GPU, KERNELS)
    except OtherTable as error:
        raise Ignored(f"not used: {error}") from None
    written = to_json(table, KERNELS)
    again = from_json(written, GPU, KERNELS)
    assert again.entries.keys() == table.entries.keys()
    assert to_json(again, KERNELS) == written
    for key, entry in table.entries.items():
        row = kernel_named(entry.kernel)
        problem = Problem(
            key.m, key.n, key.k, key.scheme, key.dtype, "cuda", GPU_FEATURES, None, GPU, key.fp16_accumulation
        )
        assert 0 < entry.us < math.inf
        if row.tile_space is not None:
            assert (
                row.why_unsupported(problem) is None
                and row.tile_space.why_invalid(problem, entry.tile) is None
            )


# Recipes

_RECIPES = (
    {
        "rotate": True,
        "default": {"format": "int4", "group_size": 64, "method": "mse"},
        "rule": [
            {"match": "*.down_proj", "format": "int8", "group_size": "channel"},
            {"match": "model.layers.[0-3].*", "keep": True},
            {"match": "*", "format": "ternary", "packing": "radix", "scale_dtype": "bfloat16"},
        ],
    },
    {"rule": [{"match": "lm_head", "format": "int4", "zero_point": "integer", "method": "rtn"}]},
)  # fmt: skip


def _toml(tree: Any) -> bytes:
    if not isinstance(tree, Pairs):
        return dump(tree)
    return b"".join(dump(key) + b" = " + _toml_value(value) + b"\n" for key, value in tree)


def _toml_value(value: Any) -> bytes:
    if isinstance(value, Pairs):
        return b"{" + b", ".join(dump(key) + b" = " + _toml_value(item) for key, item in value) + b"}"
    if isinstance(value, list):
        return b"[" + b", ".join(map(_toml_value, value)) + b"]"
    return dump(value)


_TOML_TEXT = b"""rotate = true
[default]
format = "int4"   # a comment
group_size = 64

[[rule]]
match = "*.down_proj"
format = 'int8'
group_size = "channel"

[[rule]]
match = "model.layers.[0-3].*"
keep = true
"""


def _mutate_recipe(data: bytes, random: Random) -> bytes:
    if random.randrange(2) == 0:
        return mutate_bytes(data, random)
    return _toml(mutate_tree(parse(json.dumps(random.choice(_RECIPES))), random))


_NAMES = dict.fromkeys(
    (
        "model.layers.0.mlp.down_proj",
        "model.layers.11.self_attn.q_proj",
        "lm_head",
        "model.layers.2." + "a" * 200,
    ),
    torch.bfloat16,
)


def _check_recipe(case: bytes, directory: Path) -> None:
    path = directory / "recipe.toml"
    path.write_bytes(case)
    recipe = read_recipe(path, Choice())
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    fates = recipe.fates(_NAMES, {}, {"model.norm": "a norm"})
    assert fates.keys() == _NAMES.keys()
    for fate in fates.values():
        assert (fate.scheme is None) == (fate.method is None)


# Documents

_DOCUMENTS = pack_directory(
    {
        "a.jsonl": b"".join(
            json.dumps(row).encode() + b"\n"
            for row in (
                {"text": "one"},
                {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
                {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
                {"instruction": "do", "input": "this", "output": "done"},
                {"prompt": "p", "completion": None, "content": "c"},
            )
        ),
        "b.json": b'[{"text": "one"}, {"question": "q", "answer": "a"}]',
        "c.txt": "Some text\nwith é lines\n".encode(),
        "d.jsonl.gz": __import__("gzip").compress(b'{"text": "packed"}\n', mtime=0),
    }
)


def _check_documents(case: bytes, directory: Path) -> None:
    items = unpack_directory(case)
    write_items(directory, items)
    refused: QuantkitError | None = None
    for name in ("a.jsonl", "b.json", "c.txt", "d.jsonl.gz"):
        if isinstance(items.get(name), Odd | Link):
            continue  # a file that a user names may be a pipe or a link, as of a shell
        try:
            documents = read_documents(directory / name)
        except QuantkitError as error:
            refused = error
            continue
        for document in documents:
            if isinstance(document, str):
                assert document.strip()
            else:
                assert document and all(isinstance(m["role"], str) and "content" in m for m in document)
        if name == "c.txt":
            assert documents == [(directory / name).read_bytes().decode("utf-8-sig")]
        if name == "a.jsonl":
            rows = [
                json.loads(line)
                for line in (directory / name).read_text("utf-8-sig").split("\n")
                if line.strip()
            ]
            texts = [row["text"] for row in rows if isinstance(row.get("text"), str) and row["text"].strip()]
            assert [one for one in documents if one in texts] == texts
    if refused is not None:
        raise refused


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("header", lambda: (_small_file(),), mutate_safetensors, _check_header, 0.25),
        Target("json", lambda: _JSON, mutate_json, _check_json, 0.2),
        Target("checkpoint", _checkpoints, mutate_directory, _check_checkpoint, 0.1),
        Target("low bit", low_bit_checkpoints, mutate_low_bit, check_low_bit, 0.06),
        Target("gguf", gguf_headers, mutate_gguf, check_gguf, 0.05, 5.0),
        Target("config", _configs, mutate_json, _check_config, 0.1),
        Target("manifest", _manifests, mutate_directory, _check_manifest, 0.1),
        Target("journal", journals, mutate_directory, check_journal, 0.03),
        Target("packed", _packed, mutate_directory, _check_packed, 0.1),
        Target("table", _tables, mutate_json, _check_table, 0.04),
        Target("recipe", lambda: (_TOML_TEXT,), _mutate_recipe, _check_recipe, 0.04),
        Target("documents", lambda: (_DOCUMENTS,), mutate_directory, _check_documents, 0.03),
        Target("structure", dense_checkpoints, mutate_directory, check_structure, 0.01, 10.0),
        Target("load", packed_checkpoints, mutate_directory, check_load, 0.005, 10.0),
        Target("tokenizer", tokenizers, mutate_directory, check_tokenizer, 0.01, 10.0),
        Target("generation", generation_configs, mutate_json, check_generation, 0.02, 10.0),
        Target("hub", hub_cases, mutate_hub, check_hub, 0.05, 10.0),
        Target("partial", partials, mutate_directory, check_partial, 0.02),
        Target("sensitivities", sensitivities, mutate_json, check_sensitivities, 0.02),
        Target("pictures", pictures, mutate_pictures, check_pictures, 0.03, 5.0),
        Target("convert", low_bit_models, mutate_low_bit_model, check_convert, 0.002, 10.0),
        Target("names", lambda: NAMES, mutate_name, check_name, 0.02),
    )
}
