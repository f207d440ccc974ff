"""The faults and hostile inputs that have a test each, and the table of them in docs/reliability.md.

`python -m tests.reliability.table` writes the table anew. A test says which rows it shows by its marker,
`@pytest.mark.fault(12)`, which is read from the source: nothing is imported or run.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- generated: faults -->", "<!-- end of generated: faults -->"

#: Refused before anything is written; goes on and says so; does something else that is stated; stops, and the
#: same command with --resume ends with the bytes of an uninterrupted run.
Behaviour = Literal["error", "warning", "fallback", "resumable"]


@dataclass(frozen=True)
class Fault:
    """A row: what is wrong, what quantkit then does, in one word and in full."""

    fault: str
    behaviour: Behaviour
    does: str


#: Rows by number, in sections.
FAULTS: dict[str, dict[int, Fault]] = {
    "Files of weights": {
        1: Fault(
            "an empty file, one of 7 bytes, one without a header", "error", "names the file and its size"
        ),
        2: Fault(
            "a header length of 2^63, or above the limit of 32 MiB",
            "error",
            "from the first 8 bytes; nothing of that size is allocated",
        ),
        3: Fault("a truncated file or header", "error", "says how many bytes were expected and found"),
        4: Fault("trailing bytes, a hole, tensors that overlap", "error", "names the tensor and the byte"),
        5: Fault("a key twice in the header", "error", "names it; the safetensors library takes the last"),
        6: Fault("an unknown dtype", "error", "lists those that are supported; no name becomes code"),
        7: Fault(
            "packed weights as float32, int64 or uint32",
            "error",
            "of what loads the model: tensor, file, dtype found and expected",
        ),
        8: Fault(
            "a shape that differs, also transposed or with as many elements",
            "error",
            "against the bytes in the file, config.json for plain weights and the scheme for packed ones",
        ),
        9: Fault("sizes of 0, more than 8 dimensions, 2^66 elements", "error", "says what a tensor may have"),
        10: Fault(
            "tensor names with `..`, `/`, NUL, none or 513 characters", "error", "with the name escaped"
        ),
        11: Fault("a header of a million tensors", "error", "before it is parsed"),
        12: Fault("a git LFS pointer in place of weights", "error", "and `git lfs pull` as the remedy"),
        13: Fault("an HTML page, GGUF file, zip or pickle under the name", "error", "says what the file is"),
        14: Fault(
            "a big-endian host",
            "error",
            "before a file is read. Simulated: `sys.byteorder` is replaced, no such machine was used",
        ),
        15: Fault("metadata that is no text; a megabyte of it", "error", "the first; the second is ignored"),
    },
    "Indexes and directories": {
        16: Fault("shards that the index names are missing", "error", "lists all of them"),
        17: Fault(
            "shards at `../..`, absolute and UNC paths; links out of the directory",
            "error",
            "links into the blobs of the same hub cache are followed; a side file that links out is left out "
            "with a note",
        ),
        18: Fault("the index names a tensor that no shard has", "error", "names index, tensor and shard"),
        19: Fault("a tensor in two shards", "error", "names both"),
        20: Fault(
            "a tensor in a shard that the index does not list",
            "warning",
            "and is used. There is no `--strict`: `verify` always is",
        ),
        21: Fault("the index maps a tensor to the wrong shard", "error", "names the right one"),
        22: Fault(
            "an index that is empty, cut, no UTF-8, no object, nested deeply", "error", "names the file"
        ),
        23: Fault("an index beside a single file", "warning", "the index is used, the file ignored"),
        24: Fault(
            "no safetensors, but `.bin`, `.pt` or GGUF", "error", "never unpickled; how to convert them"
        ),
        25: Fault("a wrong `total_size`", "warning", "with both numbers; nothing depends on it"),
        26: Fault(
            "shards of an older run in the output",
            "error",
            "unless `--overwrite`, which removes what the manifest lists, and nothing where another file is",
        ),
        27: Fault("file names that differ in case only", "error", "they are one file on some systems"),
    },
    "Configs and recipes": {
        28: Fault("config.json missing, empty, cut, no object, with a key twice", "error", "names the file"),
        29: Fault(
            "an architecture that transformers does not know",
            "error",
            "with its model_type; `--model-free` needs none",
        ),
        30: Fault(
            "`auto_map`, which names code of the repository",
            "error",
            "`--allow-auto-map` drops the key; the code is run in neither case",
        ),
        31: Fault(
            "a source that is quantized in a way that no reader fits, or by quantkit",
            "error",
            "by config, side file, or names and dtypes of tensors",
        ),
        32: Fault(
            "a group size that does not divide a row",
            "fallback",
            "the last group of a row is shorter, exactly counted, and a note names a linear that only "
            "quantkit can then load. Nothing is padded or skipped",
        ),
        33: Fault("an unknown format; group sizes 0, -5, 2^31", "error", "lists what there is"),
        34: Fault(
            "patterns that are no valid expression, or take forever",
            "error",
            "patterns are globs, matched without backtracking: every one is valid, and one without a "
            "match is refused with names to go by",
        ),
        35: Fault(
            "a layer under two rules",
            "fallback",
            "the first rule decides, as documented, and the plan says which; a rule that never applies is an "
            "error",
        ),
        36: Fault(
            "q, k, v or gate, up in different schemes",
            "warning",
            "quantkit and transformers run such a model, so it is written; a note says that vLLM and "
            "SGLang do not and names the linears. With `--engine` it is an error, as all that the engine "
            "refuses or misreads",
        ),
        37: Fault(
            "a tied lm_head that is quantized",
            "warning",
            "head and embedding are stored apart, config.json says so; a config that ties them again is "
            "refused",
        ),
        38: Fault("tensors that are one in memory", "fallback", "stored once, and one again when loaded"),
    },
    "Numbers": {
        39: Fault(
            "NaN or infinite weights",
            "error",
            "names tensor and rows and counts them. In place of `--allow-nonfinite` a rule keeps the "
            "layer dense",
        ),
        40: Fault("rows and groups of zeros", "fallback", "exactly zero again in every format"),
        41: Fault(
            "scales beyond float16",
            "fallback",
            "bfloat16 scales hold them, the default for weights that can be so large; a scale dtype that "
            "overflows is an error, never infinite",
        ),
        42: Fault(
            "weights below the range of their scales",
            "warning",
            "become zero; the reported error is 1, and a note names the linear",
        ),
        43: Fault(
            "constant rows, an outlier of 10^4", "fallback", "finite, and the error is the one reported"
        ),
        44: Fault(
            "negative zeros, subnormal numbers", "fallback", "dense: bit for bit; packed: zeros stay zeros"
        ),
        45: Fault(
            "one row or column, rows shorter than a group, odd sizes", "fallback", "stored as they are"
        ),
        46: Fault(
            "more than 2^31 elements",
            "fallback",
            "addressed in 64 bits. Reading, cutting, packing and writing are tested at 2^32 on files with "
            "holes; of the kernels the last programs, on memory that is not touched, in Triton's "
            "interpreter, and whole launches on a GPU",
        ),
        47: Fault(
            "weights with other strides, expanded, on meta, that require gradients",
            "fallback",
            "the same codes; without data it is an error",
        ),
        48: Fault(
            "sources in float16, bfloat16, float32, float64, float8, int8",
            "fallback",
            "cast to float32 and scales chosen by dtype; 8-bit weights are codes already and refused",
        ),
    },
    "Calibration": {
        49: Fault(
            "texts without text, or too short", "error", "says how many tokens there are and are needed"
        ),
        50: Fault(
            "binary files, invalid UTF-8, a byte order mark", "error", "with the line; the mark is dropped"
        ),
        51: Fault(
            "one line of 1 GB",
            "error",
            "after the 64 MiB that a line may have, in as little memory. It is not streamed: samples are "
            "drawn from whole documents. `.json` files may be one line",
        ),
        52: Fault(
            "no tokenizer; one of another model; one without special tokens",
            "error",
            "of the first two; special tokens are not needed",
        ),
        53: Fault(
            "an expert that no token chooses",
            "fallback",
            "gets the Hessian of all tokens of its layer, which is closer than plain rounding; in a note "
            "and the manifest",
        ),
        54: Fault(
            "a Hessian without a Cholesky factor",
            "fallback",
            "damping grows to its limit, then weights are rounded to nearest; in a note and the manifest",
        ),
        55: Fault(
            "activations beyond float16",
            "fallback",
            "blocks run in float32, or bfloat16 on a GPU, never in float16; one that is not finite is an "
            "error that names the linear",
        ),
        56: Fault("a hub that cannot be reached", "error", "in less than 5 seconds, after one attempt"),
    },
    "Files and processes": {
        57: Fault("an output that is not empty", "error", "before a weight is read, and nothing is touched"),
        58: Fault("an output that is, is in, or holds the source", "error", "also through links"),
        59: Fault(
            "no parent, a read-only one, a file in the way, an output that cannot be listed, a folder or "
            "pipe in the place of a file that is written",
            "error",
            "before a weight is read",
        ),
        60: Fault(
            "a full disk",
            "resumable",
            "known before a weight is read where the size does not fit; in the middle the shard in work "
            "is removed",
        ),
        61: Fault("EIO, short writes, fsync that fails", "resumable", "the file is not marked as done"),
        62: Fault("SIGKILL at any time, also in the check of the result", "resumable", "bit-identical"),
        63: Fault(
            "SIGINT, SIGTERM, SIGHUP",
            "resumable",
            "ends after the jobs in work, and drops the shard in work; exit codes 130, 143 and 129",
        ),
        64: Fault(
            "two processes, one directory",
            "error",
            "LOCKED, with process, host and time of the other, until the result is checked and finished; who "
            "lost the lock, as its file was removed, stops and leaves the other's files",
        ),
        65: Fault(
            "a resume with other options, version or source; a damaged journal or manifest",
            "error",
            "lists what differs, old -> new; names the line of the journal and the remedy, which keeps files",
        ),
        66: Fault("temporary files of a dead process", "fallback", "removed, by who holds the lock"),
        67: Fault("umask and permissions", "fallback", "files 0644 less the umask, whatever the source has"),
        68: Fault(
            "a source that changes during the run",
            "error",
            "found by size, times of modification and change, and inode, of config, index, shards and side "
            "files, at every read and at the end; nothing passes for finished. On a resume by size and times "
            "of config, index and shards: a copy of them with other times of change is another source",
        ),
    },
    "Hardware and software": {
        69: Fault(
            "a GPU without memory",
            "fallback",
            "fewer rows at a time, with a note; where no row fits, or a pass does not, an error with the "
            "bytes asked for and free. Never to the CPU by itself, whose bytes differ. Scales and codes are "
            "the same, but for calibrated methods on a GPU, whose library multiplies other numbers of rows "
            "in another order. Simulated, and on a GPU with a bound on what torch may allocate",
        ),
        70: Fault(
            "no GPU, no Triton, a GPU too old, other versions",
            "fallback",
            "torch computes, and a warning says why; what was asked for by name (`--device cuda`, "
            "`QUANTKIT_KERNEL`) and a transformers out of range are errors. Simulated on a CPU",
        ),
        71: Fault(
            "damaged or foreign caches, a cache that cannot be written",
            "fallback",
            "sensitivities are measured again; a tile table of another GPU or version is left out with a "
            "warning. A damaged tile table is an error that names the file: without it the model would be "
            "slower and nobody would know why. A rank that dies ends all",
        ),
        72: Fault(
            "an export of values that the target does not have, or that read back differ",
            "error",
            "names the linear, what it has and what the target holds; what differs leaves it unfinished",
        ),
    },
}

ROWS: dict[int, Fault] = {number: fault for rows in FAULTS.values() for number, fault in rows.items()}


@dataclass(frozen=True, order=True)
class Test:
    """A test function: where it is, and its name."""

    file: str
    name: str


@cache
def marked_tests() -> Mapping[int, tuple[Test, ...]]:
    """The tests of each row."""
    found: dict[int, list[Test]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.fault" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                for number in _numbers(node):
                    found.setdefault(number, []).append(Test(str(path.relative_to(ROOT)), node.name))
    return {number: tuple(tests) for number, tests in sorted(found.items())}


def _numbers(function: ast.FunctionDef) -> Iterator[int]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
            yield from (ast.literal_eval(argument) for argument in decorator.args)


def generated() -> str:
    """The tables, in Markdown."""
    tests = marked_tests()
    parts = []
    for section, rows in FAULTS.items():
        lines = [f"### {section}", "", "| | fault | | what quantkit does | tests |", "|---|---|---|---|---|"]
        for number, row in rows.items():
            links = ", ".join(
                f"[{_words(test.name)}](../{test.file})"
                for test in sorted(tests.get(number, ()), key=lambda test: "/reliability/" not in test.file)
            )
            lines.append(f"| {number} | {row.fault} | {row.behaviour} | {row.does} | {links} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def with_table(page: str) -> str:
    """A page whose generated part is that of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{generated()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
