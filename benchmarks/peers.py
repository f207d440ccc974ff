"""What other tools make of a model, for the rows of `known_models.py` and its page.

    python benchmarks/peers.py MODEL OUT --peers auto-round [--calibration mixed.jsonl] [--samples 128]
    python benchmarks/known_models.py MODEL --text wiki.txt --made OUT

A peer is a row of `PEERS`. Those with calibration data see the same texts as quantkit's methods, and as many
sequences of as many tokens. The first command is for a tool that needs other versions than ours: it runs in
an environment with that tool and quantkit. It writes OUT/NAME with a `peer.json` for each row, which the
second command evaluates in ours.
"""

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from llama_cpp_files import dequantize, importance, quantize_file, write_dense

from quantkit.calibrate.data.calibration_options import DEFAULT_LENGTH, DEFAULT_SAMPLES
from quantkit.calibrate.data.texts import BUNDLED

#: Sequences and tokens of a sequence that peers with data see, as many as quantkit's methods.
SAMPLES, LENGTH = DEFAULT_SAMPLES, DEFAULT_LENGTH


@dataclass(frozen=True)
class Made:
    """What a dense directory stands for: bits per weight of the linears, bytes of the file, and a remark."""

    bits: float
    nbytes: int | None = None
    remark: str = ""


@dataclass(frozen=True)
class Data:
    """Calibration data: texts, and how many sequences of `LENGTH` tokens a tool may take from them."""

    texts: tuple[str, ...]
    samples: int = SAMPLES

    @classmethod
    def of(cls, file: str | None, samples: int | None) -> "Data":
        """The rows `text` of a .jsonl file, by default those that come with quantkit."""
        path = BUNDLED if file is None else Path(file)
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
        found = [json.loads(line).get("text") for line in lines]
        return cls(tuple(text for text in found if text), samples or SAMPLES)

    def sequences(self, model: Path) -> list[list[int]]:
        """Sequences of `LENGTH` tokens of the joined texts, drawn at random."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = [token for text in self.texts for token in tokenizer(text, add_special_tokens=False).input_ids]
        rows = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]
        random.Random(0).shuffle(rows)
        return rows[: self.samples]


#: Writes a model to a directory that `quantkit eval` reads, perhaps by calibration data. Without `Made` it is
#: packed, and has its own bits.
Make = Callable[[Path, Path, Data], Made | None]


@dataclass(frozen=True)
class Peer:
    """Row of another tool: its package on the index, the module that it imports, and how it is called."""

    label: str
    package: str
    make: Make


def rounded(model: Path, out: Path, round_weight: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write a dense model whose linears, but for the head, have gone through `round_weight` in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dense = AutoModelForCausalLM.from_pretrained(model)
    head = dense.get_output_embeddings()
    for linear in dense.modules():
        if isinstance(linear, torch.nn.Linear) and linear is not head:
            linear.weight.data = round_weight(linear.weight.data.float()).to(linear.weight.dtype)
    dense.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def rounded_by_gguf(name: str, bits: float) -> Make:
    """Round as llama.cpp's reference for a block type does, by the package gguf."""

    def make(model: Path, out: Path, data: Data) -> Made:
        import gguf

        kind = gguf.GGMLQuantizationType[name]

        def through(weight: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind).copy())

        rounded(model, out, through)
        return Made(bits)

    return make


@lru_cache(maxsize=1)
def matrix(model: Path, data: Data) -> Mapping[str, torch.Tensor]:
    """The importance matrix of a model, which all rows that take one share."""
    return importance(model, data.sequences(model))


def llama_cpp(kind: str, calibrated: bool, model: Path, out: Path, data: Data) -> Made:
    """Quantize by llama.cpp to a type of file, with the embedding and the head at 16 bits as ours have them.

    `calibrated` by an importance matrix.
    """
    weights = matrix(model, data) if calibrated else {}
    with tempfile.TemporaryDirectory() as directory:
        dense, file = Path(directory) / "dense.gguf", Path(directory) / "quantized.gguf"
        write_dense(model, dense)
        quantize_file(dense, file, kind, weights)
        bits, kinds = dequantize(file, model, out)
        return Made(bits, file.stat().st_size, f"its linears are {kinds}")


def hqq(model: Path, out: Path, data: Data) -> Made:
    """4 bits in groups of 64, with a 16-bit scale and zero-point: HQQ's own default."""
    from hqq.core.quantize import Quantizer

    def through(weight: torch.Tensor) -> torch.Tensor:
        codes, meta = Quantizer.quantize(weight, nbits=4, group_size=64, axis=1, device="cpu")
        found: torch.Tensor = Quantizer.dequantize(codes, meta)
        return found.reshape(weight.shape)

    rounded(model, out, through)
    return Made(4 + 32 / 64)


def llm_compressor(model: Path, out: Path, data: Data) -> None:
    """W4A16 by GPTQ, as llm-compressor's own example has it."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = data.sequences(model)
    dataset = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * LENGTH for _ in rows]})
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    recipe = GPTQModifier(scheme="W4A16", targets="Linear", ignore=["lm_head"])
    oneshot(
        model=dense,
        recipe=recipe,
        dataset=dataset,
        num_calibration_samples=len(rows),
        max_seq_length=LENGTH,
    )
    dense.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def stored_bits(model: torch.nn.Module, bits: int, group: int = 128) -> float:
    """Bits per weight of a model's linears in codes of `bits`, without its head.

    Each group of a row, also the last one that is short, has a 16-bit scale and a zero-point of as many bits
    as a code.
    """
    head = model.get_output_embeddings()
    shapes = [
        linear.weight.shape
        for linear in model.modules()
        if isinstance(linear, torch.nn.Linear) and linear is not head
    ]
    groups = sum(rows * -(-columns // group) for rows, columns in shapes)
    return bits + groups * (16 + bits) / sum(rows * columns for rows, columns in shapes)


def auto_round(bits: int, steps: int, model: Path, out: Path, data: Data) -> Made:
    """Integers of auto-round in groups of 128 with so many steps a block, as a dense model."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "texts.json"
        file.write_text(json.dumps([{"text": text} for text in data.texts]), encoding="utf-8")
        given: dict[str, Any] = {
            "iters": steps,
            "nsamples": data.samples,
            "seqlen": LENGTH,
            "dataset": str(file),
        }
        tool = AutoRound(str(model), scheme=f"W{bits}A16", device_map="cpu", **given)
        # Saved as "fake", some weights would be the original's again (auto-round 0.16.1).
        found, _ = tool.quantize()
        found.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return Made(stored_bits(found, bits), remark=f"{steps} steps a block")


def gptqmodel(model: Path, out: Path, data: Data) -> None:
    """4 bits in groups of 128, GPTQModel's defaults."""
    # By default it starts a worker for two cores, and then asks for two (7.7.0).
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel, QuantizeConfig

    tool = GPTQModel.load(str(model), QuantizeConfig(bits=4, group_size=128))
    tool.quantize(
        [{"input_ids": row, "attention_mask": [1] * len(row)} for row in data.sequences(model)], batch_size=1
    )
    tool.save(str(out))


#: Types of files of llama.cpp, and those with an importance matrix, without which it makes no IQ2 or IQ1.
FILES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K")
WITH_MATRIX = ("Q4_K_M", "Q3_K_M", "Q2_K", "IQ3_XXS", "IQ2_M", "IQ2_XS", "IQ2_XXS", "IQ1_M")
#: Block types of llama.cpp: codes, and a 16-bit scale, or a scale and a minimum, for 32 weights.
PEERS = (
    *(Peer(f"llama.cpp {kind}", "llama-cpp-python", partial(llama_cpp, kind, False)) for kind in FILES),
    *(
        Peer(f"llama.cpp {kind}, imatrix", "llama-cpp-python", partial(llama_cpp, kind, True))
        for kind in WITH_MATRIX
    ),
    Peer("llama.cpp Q5_1", "gguf", rounded_by_gguf("Q5_1", 6.0)),
    Peer("llama.cpp Q4_1", "gguf", rounded_by_gguf("Q4_1", 5.0)),
    Peer("llama.cpp Q4_0", "gguf", rounded_by_gguf("Q4_0", 4.5)),
    Peer("HQQ, 4 bits, groups of 64", "hqq", hqq),
    Peer("llm-compressor, W4A16 by GPTQ", "llmcompressor", llm_compressor),
    *(Peer(f"auto-round, W{bits}A16", "auto-round", partial(auto_round, bits, 50)) for bits in (4, 3, 2)),
    # Its default, which is four times as slow.
    Peer("auto-round, W2A16, 200 steps", "auto-round", partial(auto_round, 2, 200)),
    Peer("GPTQModel, 4 bits, groups of 128", "gptqmodel", gptqmodel),
)


#: Name of the record of a finished peer in its directory.
RECORD = "peer.json"


@dataclass(frozen=True)
class Finished:
    """Directory that a peer wrote: its row, seconds, versions, and what it stands for if it is dense."""

    label: str
    directory: Path
    seconds: float
    versions: str
    made: Made | None

    @property
    def note(self) -> str:
        """Return a line about it for the page."""
        remark = f"; {self.made.remark}" if self.made is not None and self.made.remark else ""
        return f"{self.label}: {self.versions}{remark}"

    def store(self) -> None:
        """Write the record into the directory."""
        found = asdict(self)
        del found["directory"]
        (self.directory / RECORD).write_text(json.dumps(found, indent=1) + "\n")

    @classmethod
    def stored(cls, record: Path) -> "Finished":
        """Read what `store` wrote."""
        found = json.loads(record.read_text())
        made = None if found["made"] is None else Made(**found["made"])
        return cls(**{**found, "directory": record.parent, "made": made})


def wanted(names: Sequence[str]) -> Iterator[Peer]:
    """Return the peers whose label has one of the names in it; all, if there is no name."""
    given = [name.lower() for name in names]
    return (peer for peer in PEERS if not given or any(name in peer.label.lower() for name in given))


def finished(peer: Peer, model: Path, out: Path, data: Data) -> Finished:
    """Let a peer that is installed quantize a model to a folder in `out`."""
    place = out / "".join(letter if letter.isalnum() else "-" for letter in peer.label)
    begin = time.perf_counter()
    made = peer.make(model, place, data)
    seconds = time.perf_counter() - begin
    # Some write into a folder of their own.
    directory = sorted(place.rglob("config.json"))[0].parent
    return Finished(peer.label, directory, seconds, f"{peer.package} {installed(peer.package)}", made)


def installed(package: str) -> str | None:
    """The version of a package; None if it is not here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Quantize a model by each of the peers whose package is here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", nargs="+", required=True, help="names, or parts of names")
    parser.add_argument("--calibration", help="a .jsonl file with rows `text`, by default quantkit's own")
    parser.add_argument("--samples", type=int)
    options = parser.parse_args(arguments)
    others = ", ".join(f"{name} {installed(name)}" for name in ("torch", "transformers"))
    data = Data.of(options.calibration, options.samples)
    asked = list(wanted(options.peers))
    if not asked:
        there = ", ".join(peer.label for peer in PEERS)
        sys.exit(f"no peer is called {' or '.join(map(repr, options.peers))}; there are {there}")
    for peer in asked:
        if installed(peer.package) is None:
            sys.exit(f"{peer.label}: {peer.package} is not installed (pip install {peer.package})")
        found = finished(peer, options.model, options.out, data)
        found = replace(found, versions=f"{found.versions} with {others}")
        found.store()
        print(f"{found.note}, {found.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
