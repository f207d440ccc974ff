"""`quantkit convert` and `verify --against`: the same values, proved, or a refusal that names the tensor."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.manifest import read_manifest
from quantkit.converting import ConvertOptions, plan

from ..checkpoint.gguf_files import CHAT_TEMPLATE, tiny_model, tokenizer_metadata, write_gguf
from ..conftest import Run
from ..support.compare import assert_equal

STORIES_MODEL = Path(__file__).parents[2] / "examples" / "stories260K"
#: What llama.cpp's Q4_1 files have: linears in Q4_1, the embedding in Q8_0.
Q4_1 = {"token_embd.weight": "Q8_0"}


@pytest.fixture(autouse=True)
def small_products(one_thread: None) -> None:
    """Also where no command runs."""


def types(linears: str, others: dict[str, str] | None = None) -> Any:
    """The type of each tensor: `linears` for matrices in a layer, float32 for all that is not named."""

    def of(name: str, shape: tuple[int, ...]) -> str:
        return (others or {}).get(name, linears if len(shape) == 2 and name.startswith("blk.") else "F32")

    return of


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", vocab_size=264, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def source(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, "llama", model, types("Q4_1", Q4_1), general__name="tiny", **tokenizer_metadata())


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    quantkit.convert(source, out)
    return out


def dense_state(source: Path) -> dict[str, torch.Tensor]:
    """The weights of a GGUF file by the package gguf, under llama.cpp's names."""
    return {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(source).tensors
    }


def test_a_converted_model_computes_what_the_file_does(model: Any, source: Path, converted: Path) -> None:
    """Against a model of the values that the package gguf gives; q and k in the order of transformers."""
    stored = dense_state(source)
    state = dict(model.state_dict())
    for name in ("q", "k"):
        heads = 4 if name == "q" else 2
        for layer in range(2):
            weights = stored.pop(f"blk.{layer}.attn_{name}.weight")
            halves = weights.view(heads, -1, 2, weights.shape[1]).transpose(1, 2)
            state[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = halves.reshape(weights.shape)
    table = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
    table |= {f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    for layer in range(2):
        for theirs, ours in table.items():
            state[f"model.layers.{layer}.{ours}.weight"] = stored.pop(f"blk.{layer}.{theirs}.weight")
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = stored.pop("token_embd.weight")
    dense = type(model)(model.config).eval()
    dense.load_state_dict(state)
    packed = quantkit.load(converted, device="cpu")
    assert packed.dtype == torch.float32
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected, found = dense(ids).logits, packed(ids).logits
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5
    for name, module in packed.named_modules():
        if hasattr(module, "packed"):
            assert_equal(module.packed.dequantize(), state[f"{name}.weight"], name)


def test_what_is_written_is_said(run: Run, source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "out", "--no-check")
    assert done.code == 0, done.err
    assert "14 int4 g32 asym-min float16: Q4_1 in the source (model.layers.*.mlp.down_proj, ...)" in done.out
    assert f"14 linears and the token embedding have the values of {source}, bit by bit" in done.out
    assert "1 int8 g32 float16: Q8_0 in the source (model.embed_tokens)" in done.out
    assert "1 int8 g32 float16: the table of model.embed_tokens (lm_head)" in done.out
    manifest = read_manifest(tmp_path / "out")
    assert manifest["recipe"] == {"convert": "codes and scales of the source"}
    assert manifest["source_kind"] == "file"
    layer = manifest["layers"]["model.layers.0.mlp.up_proj"]
    assert (layer["relative_error"], layer["method"], layer["reason"]) == (0.0, None, "Q4_1 in the source")
    done = run("report", tmp_path / "out", "--out", tmp_path / "card")
    assert done.code == 0, done.err
    card = (tmp_path / "card" / "README.md").read_text()
    assert "15 matrices in 15 linears" in card and "| int8 g32 float16 | - | 2 | 8.508 |" in card


def test_a_dense_embedding_is_stored_for_other_tools(run: Run, source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "out", "--no-check", "--dense-embeddings")
    assert done.code == 0, done.err
    assert f"14 linears have the values of {source}, bit by bit" in done.out
    note = "model.embed_tokens.weight, Q8_0 in the source, is stored as float32: --dense-embeddings."
    assert note in " ".join(done.err.split())
    assert load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"].is_floating_point()


def test_tokenizer_template_and_generation_go_along(run: Run, converted: Path) -> None:
    assert (converted / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    done = run("generate", converted, "hello", "--max-new-tokens", "2")
    assert done.code == 0, done.err


def test_a_finished_output_is_resumed_and_the_source_is_the_same(
    run: Run, source: Path, converted: Path
) -> None:
    done = run("convert", source, converted, "--resume", "--no-check", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["container"] == "quantkit"


@pytest.mark.usefixtures("reloaded_here")
def test_verify_compares_every_weight(run: Run, source: Path, converted: Path, tmp_path: Path) -> None:
    done = run("verify", converted, "--against", source)
    assert done.code == 0, done.out + done.err
    assert f"ok     values: 20 tensors, 15 of them packed, against {source}" in done.out
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in converted.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 0] ^= 1
    tensors["model.norm.weight"][5] += 1
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    done = run("verify", damaged, "--no-reload", "--against", source)
    assert done.code == 3
    assert "FAILED values" in done.out
    assert "model.layers.1.mlp.up_proj.weight[3, 0] is " in done.out
    assert "model.norm.weight[5] is " in done.out
    assert "in the source" in done.out
    done = run("verify", converted, "--no-reload", "--against", tmp_path / "nothing")
    assert done.code == 3
    assert "FAILED values" in done.out


@pytest.mark.parametrize(
    ("kind", "scheme", "container"),
    [
        ("Q4_0", "int4 g32 float16", "compressed-tensors"),
        ("Q5_0", "int5 g32 float16", "quantkit"),
        ("Q5_1", "int5 g32 asym-min float16", "quantkit"),
        ("Q8_0", "int8 g32 float16", "compressed-tensors"),
        ("MXFP4", "fp4-e2m1 g32 e8m0", "compressed-tensors"),
    ],
)
def test_each_type_becomes_its_scheme(
    model: Any, tmp_path: Path, kind: str, scheme: str, container: str
) -> None:
    of = types(kind, {"token_embd.weight": kind})
    path = write_gguf(tmp_path / "a.gguf", "llama", model, of, general__name="a")
    result = quantkit.convert(path, tmp_path / "out")
    assert {str(layer.scheme) for layer in result.plan.layers if layer.scheme} == {scheme}
    assert result.plan.config.container == "quantkit"
    # Other tools could read it but for the embedding.
    _, dense = plan(path, ConvertOptions(dense_embeddings=True))
    assert dense.config.container == container
    said = any("for model.embed_tokens is packed" in text for text in result.plan.warnings)
    assert said == (container == "compressed-tensors") and not dense.warnings
    assert set(result.relative_errors.values()) == {0.0}


def test_linears_get_the_packing_that_they_can_have(run: Run, model: Any, tmp_path: Path) -> None:
    of = types("Q5_0", {"blk.0.ffn_up.weight": "Q8_0"})
    path = write_gguf(tmp_path / "a.gguf", "llama", model, of, general__name="a")
    out, options = tmp_path / "out", ("--dense-embeddings", "--packing", "stream")
    done = run("convert", path, out, "--no-check", *options)
    assert done.code == 0, done.err
    assert "13 int5 g32 stream float16: Q5_0 in the source" in done.out
    assert "1 int8 g32 float16: Q8_0 in the source" in done.out
    assert "a compressed-tensors checkpoint" in done.out
    assert run("verify", out, "--no-reload", "--against", path).code == 0
    path = write_gguf(tmp_path / "b.gguf", "llama", model, types("Q4_0", {}), general__name="b")
    done = run("convert", path, tmp_path / "none", *options)
    assert done.code == 2
    assert "--packing stream is for no linear of this source: they become int4." in done.err


def test_types_without_a_scheme_are_refused_by_name(run: Run, tmp_path: Path) -> None:
    """K-quants have scales of scales; `quantize` reads them."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=256)
    others = {"blk.1.ffn_up.weight": "Q4_K", "blk.1.ffn_down.weight": "Q6_K"}
    path = write_gguf(tmp_path / "a.gguf", "llama", model, types("Q4_0", others), general__name="a")
    done = run("convert", path, tmp_path / "out", "--no-check")
    assert done.code == 3
    assert (
        "'model.layers.1.mlp.up_proj' and 1 more cannot be converted exactly: tensor "
        "'model.layers.1.mlp.up_proj.weight' is Q4_K: its scales have scales of their own. `quantkit "
        "quantize` reads the same source"
    ) in done.err
    assert not (tmp_path / "out").exists()
    assert run("quantize", path, tmp_path / "out", "--method", "rtn", "--no-check").code == 0


def test_a_head_without_a_scheme_stays_dense(tmp_path: Path) -> None:
    """llama.cpp stores heads in Q6_K, whatever the rest of a file is in."""
    model = tiny_model("llama", hidden_size=256, tie_word_embeddings=False)
    path = write_gguf(
        tmp_path / "a.gguf", "llama", model, types("Q4_0", {"output.weight": "Q6_K"}), general__name="a"
    )
    result = quantkit.convert(path, tmp_path / "out")
    head = next(layer for layer in result.plan.layers if layer.linear.kind == "lm_head")
    assert head.scheme is None
    assert "is Q6_K: its scales have scales of their own" in head.fate.reason
    assert any(note.startswith("lm_head.weight, Q6_K in the source, is stored") for note in result.plan.notes)


def test_plain_weights_have_nothing_to_convert(run: Run, model: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", model, general__name="a")
    done = run("convert", path, tmp_path / "out")
    assert done.code == 3
    assert "no linear is stored with codes and scales, so there is nothing to convert" in done.err
    assert not (tmp_path / "out").exists()


def test_quantize_reads_the_same_file(run: Run, source: Path, tmp_path: Path) -> None:
    done = run("quantize", source, tmp_path / "out", "--format", "int8", "--lm-head", "int8", "--no-check")
    assert done.code == 0, done.err
    assert "note: read from tiny.gguf: 14 Q4_1, 5 F32, 1 Q8_0." in done.err
    done = run("plan", source, "--format", "int4")
    assert done.code == 0, done.err


def test_what_is_no_checkpoint_is_no_source(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"no GGUF")
    done = run("convert", tmp_path / "a.gguf", tmp_path / "out")
    assert done.code == 3
    assert "a.gguf: the file starts with b'no G'; expected b'GGUF'" in done.err
    done = run("convert", tmp_path / "b.gguf", tmp_path / "out")
    assert done.code == 2
    assert "or a .gguf file" in done.err


def test_what_export_wrote_is_a_source(run: Run, tmp_path: Path) -> None:
    """Its manifest is about its own files, and no file to copy."""
    own, exported, back = (tmp_path / name for name in ("own", "mlx", "back"))
    assert run("quantize", STORIES_MODEL, own, "-g", 32, "--rule", "*.down_proj=keep", "--no-check").code == 0
    assert run("export", own, exported, "--to", "mlx").code == 0
    done = run("convert", exported, back, "--no-check")
    assert done.code == 0, done.err
    assert "30 linears have the values of" in done.out
    assert "MLX: int4, groups of 32, minimums" in run("inspect", exported).out
