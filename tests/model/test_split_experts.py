"""Experts that are stored in one tensor for all, read as matrices of their own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose

from quantkit.checkpoint.low_bit.fp4 import Fp4
from quantkit.checkpoint.low_bit.weight import LowBitTensor, Settings
from quantkit.checkpoint.source import Checkpoint
from quantkit.model.experts import ExpertsSpec
from quantkit.model.names import Renamed
from quantkit.model.split_experts import CutTensor, cuts_of, with_cuts
from quantkit.quantization.nesting import nested_scheme, why_not_nested

from ..support.compare import assert_equal
from .test_experts_spec import Toy

#: Gate and up [E, I, H], and down [E, H, I].
GATE, UP = torch.randn(2, 2, 4, 16, generator=torch.Generator().manual_seed(0))
DOWN = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1))
GATE_UP = torch.cat([GATE, UP], 1)
#: What a file has of gate and up, by the operations with which transformers makes [E, 2I, H] of it.
STORED = {
    "as it is": ((), {"gate_up_proj": GATE_UP}),
    "turned": ((Transpose(1, 2),), {"gate_up_proj": GATE_UP.transpose(1, 2)}),
    "turned where its shape differs": (
        (Transpose(1, 2, check_dims=True),),
        {"gate_up_proj": GATE_UP.transpose(1, 2)},
    ),
    "of the shape of the parameter": ((Transpose(1, 2, check_dims=True),), {"gate_up_proj": GATE_UP}),
    "interleaved": ((Interleave(dim=1),), {"w13_weight": torch.stack([GATE, UP], 2).flatten(1, 2)}),
    "in two": ((Concatenate(dim=1),), {"gate_proj.weight": GATE, "up_proj.weight": UP}),
}


def opened(directory: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / "model.safetensors")
    return Checkpoint.of_files([directory / "model.safetensors"])


def split(directory: Path, operations: tuple, gate_up: dict[str, torch.Tensor], **more) -> Checkpoint | None:
    tensors = {**{f"moe.{name}": one for name, one in gate_up.items()}, "moe.down_proj": DOWN, **more}
    checkpoint = opened(directory, tensors)
    places = {
        f"moe.{name}": Renamed("layers.0.moe.gate_up_proj", operations, part)
        for part, name in enumerate(gate_up)
    }
    places["moe.down_proj"] = Renamed("layers.0.moe.down_proj")
    places |= {name: Renamed(name) for name in more}
    cuts = cuts_of({"layers.0.moe": Toy()}, checkpoint.tensors, places)
    return with_cuts(checkpoint, cuts) if cuts else None


@pytest.mark.parametrize("kind", STORED)
def test_matrices_are_those_of_the_model_however_they_are_stored(tmp_path, kind):
    operations, gate_up = STORED[kind]
    checkpoint = split(tmp_path, operations, gate_up, other=torch.arange(3.0))
    assert checkpoint is not None
    wanted = {f"{e}.{leaf}": part[e] for e in range(2) for leaf, part in _PARTS.items()}
    read = {name: checkpoint.read(name) for name in checkpoint.tensors if ".weight" in name}
    assert {".".join(name.split(".")[-3:-1]) for name in read} == set(wanted)
    for name, tensor in read.items():
        matrix = wanted[".".join(name.split(".")[-3:-1])]
        assert checkpoint.tensors[name].shape == matrix.shape
        assert_equal(tensor, matrix)
        assert_equal(checkpoint.read(name, 1, 3), matrix[1:3])
        assert tensor.is_contiguous()
    assert_equal(checkpoint.read("other"), torch.arange(3.0))


_PARTS = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}


def test_only_matrices_that_are_ranges_of_the_file_are_read_in_rows(tmp_path):
    for kind, whole in (("as it is", False), ("in two", False), ("turned", True), ("interleaved", True)):
        checkpoint = split(tmp_path, *STORED[kind])
        gate = next(one for name, one in checkpoint.tensors.items() if ".1.gate_proj." in name)
        assert gate.whole == whole, kind
        assert len({one.location for one in checkpoint.tensors.values()}) == len(checkpoint.tensors)
        assert checkpoint.nbytes == (GATE.numel() + UP.numel() + DOWN.numel()) * 4


def test_names_are_those_of_the_file_where_it_has_the_name_of_the_parameter(tmp_path):
    named = split(tmp_path, *STORED["as it is"])
    assert "moe.1.up_proj.weight" in named.tensors and "moe.gate_up_proj" not in named.tensors
    # The tensors of the file can still be read, for experts that stay dense.
    assert_equal(named.read("moe.gate_up_proj", 1, 2), GATE_UP[1:])
    renamed = split(tmp_path, *STORED["interleaved"])
    assert "layers.0.moe.1.up_proj.weight" in renamed.tensors


@pytest.mark.parametrize("rows", ["gate then up", "alternating"])
def test_matrices_of_a_low_bit_source_have_its_codes_and_scales(tmp_path, rows):
    """MXFP4 blocks [E, N, G, B], as gpt-oss has them: the parameter is [E, K, N]."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (2, 8, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 8, 2), generator=generator, dtype=torch.uint8)
    stored = opened(tmp_path, {"codes": codes, "scale": scales})
    weight = Fp4.of_blocks(stored.tensors, Settings())
    file, offset = stored.tensors["codes"].file, stored.tensors["codes"].offset
    source = LowBitTensor("moe.gate_up_proj", "BF16", (2, 64, 8), file, offset, weight=weight)
    whole = source.values(stored.read_stored, 0, 2)
    spec = ExpertsSpec(transposed=True, interleaved=rows == "alternating")
    for expert in range(2):
        for index, matrix in enumerate(spec.split(whole[expert].T, "gate_up_proj", 0)):
            cut = CutTensor.from_source("one", source, spec, expert, index, 2)
            assert (cut.shape, cut.whole, cut.stored_as) == ((4, 64), False, source.stored_as)
            assert_equal(cut.values(stored.read_stored, 1, 3), matrix[1:3])
            grid = cut.grid(stored.read_stored, 0, 4)
            assert (
                why_not_nested(cut.grid_spec) is None
                and nested_scheme(cut.grid_spec).format.name == "fp4-e2m1"
            )
            assert_equal(grid.values().bfloat16(), matrix)


@pytest.mark.parametrize(
    ("operations", "gate_up"),
    [
        ((MergeModulelist(0), Concatenate(1)), {"gate_up_proj": GATE_UP}),
        ((), {"gate_up_proj": GATE_UP.transpose(1, 2)}),
        ((Interleave(dim=1), Transpose(1, 2)), {"gate_up_proj": GATE_UP}),
    ],
)
def test_what_is_stored_in_other_ways_is_not_cut(tmp_path, operations, gate_up):
    assert split(tmp_path, operations, gate_up) is None
