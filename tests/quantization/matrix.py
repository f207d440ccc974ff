"""Tiny random models of transformers' classes, and what quantkit makes of each.

    python -m tests.quantization.matrix RESULTS.json [CLASS ...] [--jobs N] [--seconds N]

quantizes each class of `names()` in the ways of `COLUMNS`, loads the result as that class, and compares its
outputs with those of the dense model that has what `unpacked` reads from the file, without quantkit, for each
packed matrix. Each column of a class is right, or refused and why. Nothing else may happen. Results are
written after each class, and a run goes on with those that the file lacks or that are named. A file with
results of another commit is refused.

    python -m tests.quantization.matrix summary    # the table of docs/guide/models.md
"""

import argparse
import contextlib
import inspect
import io
import json
import math
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import quantkit
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.quantization.blockwise.calibration_data import read_samples

from .tiny import VOCAB, inputs_of, names, save_source, tiny_model

ROOT = Path(__file__).parents[2]
#: The bundled text would take a third of the time of a class to read.
TEXT = ROOT / "examples" / "stories.txt"
#: Ways of quantizing each class. Blocks of all classes run on 16 samples of 16 bytes of a text.
INT4: dict[str, Any] = {"format": "int4", "group_size": 32}
COLUMNS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int4": INT4,
    "gptq": {**INT4, "method": "gptq", "calibration": CalibrationOptions(str(TEXT), 16, 16)},
}


def outputs(model: Any) -> torch.Tensor:
    """The first output of a model for `inputs_of` it; some draw noise."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs_of(model))[0].float()


def unpacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of a pack-quantized checkpoint of symmetric integers, read by the published format.

    Codes of b bits are stored with 2^(b - 1) added, the first in the lowest bits of an int32.
    """
    found = {}
    for name, scale in tensors.items():
        stem = name.removesuffix("_scale")
        if name.endswith(".weight_scale"):
            # Where only quantkit knows the name, its container has the words under that of the weight.
            words = tensors.get(f"{stem}_packed", tensors.get(stem))
            found[stem] = words, scale, tensors[f"{stem}_shape"].tolist()[1]
    # A row of few columns has as many words of either width.
    bits = next(
        b
        for b in (4, 8)
        if all(words.shape[1] == -(-columns * b // 32) for words, _, columns in found.values())
    )
    fields = torch.arange(0, 32, bits)
    for stem, (words, scale, columns) in found.items():
        codes = (words.to(torch.int64)[..., None] >> fields) & (2**bits - 1)
        codes = codes.flatten(1)[:, :columns] - 2 ** (bits - 1)
        # The last of the groups may be shorter.
        size = columns if scale.shape[1] == 1 else INT4["group_size"]
        yield stem, codes.float() * scale.float().repeat_interleave(size, 1)[:, :columns]


def _places(name: str, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Views of `tensors` that may be the matrix `name`, of its own or in one tensor with all experts'."""
    if name in tensors:
        yield from (tensors[name], tensors[name].T) if tensors[name].ndim == 2 else ()
        return
    stem, _, rest = name.rpartition(".experts.")
    expert = rest.partition(".")[0]
    for of, tensor in tensors.items():
        if not expert.isdigit() or not of.startswith(f"{stem}.") or tensor.ndim != 3:
            continue
        if len(tensor) > int(expert):
            for one in (tensor[int(expert)], tensor[int(expert)].T):
                half = len(one) // 2
                yield from (one, one[:half], one[half:], one[::2], one[1::2])


def put(matrices: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put matrices, each near the original, in their places in `tensors`; return those without a place."""
    left = {}
    for name, matrix in matrices.items():
        places = [one for one in _places(name, tensors) if one.shape == matrix.shape]
        errors = [float((matrix - one.float()).norm() / one.float().norm()) for one in places]
        if not errors:
            left[name] = matrix
            continue
        assert min(errors) < 0.3, f"{name} is {min(errors):.2f} of itself away from the original"
        places[errors.index(min(errors))].copy_(matrix)
    return left


def rounded(source: Path, packed: Path, to: Path) -> dict[str, torch.Tensor]:
    """Write `source` with the matrices of `packed` in their places; return those that the files have not.

    They are there under their names, or in one tensor with those of all experts.
    """
    to.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    left = put(dict(unpacked(load_file(packed / "model.safetensors"))), tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return left


def _linear_weights(model: Any) -> int:
    """Weights of all linears and stacks of experts of a model, but for its head."""
    head = None
    with contextlib.suppress(Exception):
        head = model.get_output_embeddings()
    linears = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    experts = {one for name, one in model.named_parameters() if ".experts." in name and one.ndim == 3}
    return sum(one.numel() for one in linears | experts)


def _generated(model: Any) -> list[int] | None:
    """Tokens that a model generates; None if it does not by a prompt alone."""
    if not model.can_generate():
        return None
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    torch.manual_seed(0)
    made = model.generate(**inputs_of(model), **options)
    return made.flatten().tolist() if isinstance(made, torch.Tensor) else None


@torch.no_grad()
def _gain(cls: Any, directory: Path, options: CalibrationOptions) -> float | None:
    """Squared errors of the outputs of all linears with gptq's weights, over those with mse's.

    By the inputs that they have in the original, on the calibration data. None if none of them differ.
    """
    source, *twins = (
        cls.from_pretrained(directory / one).eval() for one in ("source", "rounded-int4", "rounded-gptq")
    )
    sums = [0.0, 0.0]

    def see(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
            changes = [twin.get_submodule(name).weight - module.weight for twin in twins]
            size = (inputs[0] @ (module.weight if isinstance(module, Conv1D) else module.weight.T)).norm()
            if size > 0 and not torch.equal(*changes):
                for at, change in enumerate(changes):
                    error = inputs[0] @ (change if isinstance(module, Conv1D) else change.T)
                    sums[at] += float((error.norm() / size) ** 2)

        return hook

    for name, module in source.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.register_forward_hook(see(name))
    tokens = read_samples(Checkpoint.open(directory / "source"), options, VOCAB).tokens
    takes = inspect.signature(source.forward).parameters
    inputs = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in takes}
    # The head of a classifier may ask for more than a text has, after all that is measured.
    with contextlib.suppress(ValueError):
        source(**inputs, **({"use_cache": False} if "use_cache" in takes else {}))
    return sums[1] / sums[0] if sums[0] else None


def check(name: str, directory: Path, column: str, **options: Any) -> dict[str, Any]:
    """Quantize the model of class `name` in `directory`, and compare; returns what was found."""
    source, out, dense = directory / "source", directory / column, directory / f"rounded-{column}"
    cls = getattr(transformers, name)
    try:
        result = quantkit.quantize(source, out, device="cpu", check=True, **options)
    except QuantkitError as error:
        # What a run leaves shows whether it was refused before any work.
        return {"result": "refused", "why": str(error).replace(str(source), "MODEL"), "late": out.exists()}
    left = rounded(source, out, dense)
    model, info = cls.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    twin = cls.from_pretrained(dense).eval()
    with torch.no_grad():
        # Those that the model has, and the file in another form.
        left = put(left, dict(twin.named_parameters()))
    found, expected = outputs(model.eval()), outputs(twin)
    assert bool(torch.isfinite(expected).all())
    error = float((found - expected).norm() / expected.norm())
    # Matrices without a place in either are compared by their effect only.
    assert error < (0.1 if left else 1e-3), f"outputs differ by {error:.2e}"
    sizes = [matrix.numel() for _, matrix in unpacked(load_file(out / "model.safetensors"))]
    assert sizes
    tokens: list[int] | None = None
    if column == "int8":
        with contextlib.suppress(Exception):
            tokens = _generated(twin)
        assert tokens is None or _generated(model) == tokens, "other tokens are generated"
    share = sum(sizes) / max(1, _linear_weights(twin))
    calibrated = None
    if "calibration" in options and (directory / "rounded-int4").exists():
        plain = dict(unpacked(load_file(directory / "int4" / "model.safetensors")))
        ours = dict(unpacked(load_file(out / "model.safetensors")))
        calibrated = sum(not torch.equal(one, plain[name]) for name, one in ours.items()) / len(ours)
        gain = _gain(cls, directory, options["calibration"])
        assert gain is None or gain < 1, f"calibrated outputs are {gain:.2f} times as far from the original"
    return {
        "result": "right",
        "matrices": len(sizes),
        "share": round(share, 3),
        "error": float(f"{error:.1e}"),
        **({"unknown": len(left)} if left else {}),
        **({} if tokens is None else {"generates": True}),
        **({} if calibrated is None else {"calibrated": round(calibrated, 3)}),
        **({} if calibrated is None or gain is None else {"gain": round(gain, 3)}),
        "readers": list(result.plan.readers),
        **({"warnings": list(result.plan.warnings)} if column == "int8" else {}),
    }


def attempt(name: str, directory: Path, columns: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`check` each column, or say why no tiny model of the class is made, or which error should not be."""
    try:
        save_source(tiny_model(name), directory / "source")
        load = getattr(transformers, name).from_pretrained
        model, info = load(directory / "source", output_loading_info=True)
        if not torch.equal(outputs(model.eval()), outputs(model)):
            raise ValueError("its outputs are random")
        if info["missing_keys"]:
            raise ValueError(f"transformers cannot read what it wrote: no {min(info['missing_keys'])!r}")
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return {column: {"result": "not made", "why": why} for column in columns}
    found = {}
    for column, options in columns.items():
        start = time.perf_counter()
        try:
            found[column] = check(name, directory, column, **options)
        except Exception as error:
            frames = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            found[column] = {"result": "WRONG", "why": why, "frames": frames}
        found[column]["seconds"] = round(time.perf_counter() - start, 1)
    return found


STORED = ROOT / "benchmarks" / "results" / "classes" / "matrix.json"
PAGE = ROOT / "docs" / "guide" / "models.md"
BEGIN, END = "<!-- generated: classes -->", "<!-- end of generated: classes -->"
#: Lines of the table, by result. Those not made do not run in transformers.
LINES = {"right": "packed, with the right outputs", "refused": "refused", "WRONG": "wrong"}


def with_summary(page: str) -> str:
    """docs/guide/models.md with the table of the stored results."""
    document = json.loads(STORED.read_text())
    found = list(document["classes"].values())
    run = [one for one in found if one["int8"]["result"] in LINES]
    versions = " and ".join(f"{name} {version}" for name, version in document["versions"].items())
    rows = [
        [
            f"{len(run)} of {len(found)} classes run in {versions}",
            "int8",
            "int4, groups of 32",
            "same by gptq",
        ],
        ["---"] * 4,
    ]
    for result, line in LINES.items():
        counts = [sum(one[column]["result"] == result for one in run) for column in COLUMNS]
        rows += [[line, *map(str, counts)]] if any(counts) else []
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n{END}{rest.split(END)[1]}"


def _prepare() -> None:
    """Each process of a run is one thread, and says nothing."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def _tried(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        return attempt(name, Path(directory), COLUMNS)


def _known(results: Path, head: dict[str, Any]) -> dict[str, Any]:
    """The results that a file has, none if there is no file; exits if they are not of `head`."""
    if not results.exists():
        return {}
    document = json.loads(results.read_text())
    classes: dict[str, Any] = document.pop("classes")
    if document != head or head["commit"].endswith("changes"):
        of = document.get("commit", "several commits")
        raise SystemExit(
            f"{results} has results of {of} with {document['versions']}, and the tree is {head['commit']} "
            f"with {head['versions']}. Name another file, or remove this one."
        )
    return classes


def run(results: Path, chosen: list[str], head: dict[str, Any], jobs: int, seconds: float = math.inf) -> int:
    """Add the results of the chosen classes, or of those that `results` lacks; returns how many are left.

    `jobs` processes try a class each. After `seconds` no further one starts.
    """
    known, end = _known(results, head), time.monotonic() + seconds
    left = chosen or [name for name in names() if name not in known]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool:
        running: dict[Any, str] = {}
        while True:
            while left and len(running) < jobs and time.monotonic() < end:
                name = left.pop(0)
                running[pool.submit(_tried, name)] = name
            if not running:
                return len(left)
            for one in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(one)
                known[name] = one.result()
                print(name, json.dumps(known[name]), flush=True)
                lines = [f"{json.dumps(one)}: {json.dumps(known[one])}" for one in names() if one in known]
                classes = ",\n".join(lines)
                written = results.with_suffix(".part")
                written.write_text(f'{json.dumps(head)[:-1]}, "classes": {{\n{classes}\n}}}}\n')
                written.replace(results)


def main() -> None:
    from benchmarks.machine import commit  # Only a run from the root of the tree has it.

    parser = argparse.ArgumentParser("python -m tests.quantization.matrix")
    parser.add_argument("results")
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_intermixed_args()
    if options.results == "summary":
        PAGE.write_text(with_summary(PAGE.read_text()))
        return
    head = {
        "command": f"python -m tests.quantization.matrix {STORED.relative_to(ROOT)}",
        "versions": {one.__name__: one.__version__ for one in (transformers, torch)},
        "commit": commit(),
    }
    left = run(Path(options.results), options.classes, head, options.jobs, options.seconds)
    print(f"{left} classes are left" + ("; run this again." if left else "."))


if __name__ == "__main__":
    main()
