"""Names of other tools, and of other options of this one: what a user who gives them is likely to mean.

Slips within one table are found by `errors.unknown_name`. These rows are for names that stand elsewhere. They
advise options of the command line, which `in_python` turns to keyword arguments. This module imports no
other: a module that has a table of names gives them to `Names` as it is imported.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Names:
    """Names of a `kind` of things, as far as the module that has their table was imported."""

    kind: str
    _given: ClassVar[dict[str, Collection[str]]] = {}

    def give(self, names: Collection[str]) -> None:
        """Set the names, which may grow."""
        self._given[self.kind] = names

    def __iter__(self) -> Iterator[str]:
        return iter(self._given.get(self.kind, ()))


FORMATS, SCHEMES, METHODS = Names("format"), Names("scheme"), Names("method")
ZERO_POINTS, KV_FORMATS = Names("zero-point"), Names("KV cache format")


@dataclass(frozen=True)
class Meant:
    """Names that are given for one of `kinds` of things, and what to do instead.

    `names` are those of a table, or a pattern of the whole name. `{name}` in `advice` is the name as the
    table has it, `{bits}` and the like what that group of the pattern matched.
    """

    kinds: tuple[str, ...]
    names: Names | str
    advice: str

    def of(self, kind: str, given: str) -> str | None:
        """The advice for a name of a kind; None if this row has none."""
        if kind not in self.kinds:
            return None
        if isinstance(self.names, str):
            match = re.fullmatch(self.names, given, re.IGNORECASE)
            return match and self.advice.format(name=given, **match.groupdict())
        name = next((one for one in self.names if one.lower() == given.lower()), None)
        return None if name is None else self.advice.format(name=name)


#: What says how weights are stored.
_WEIGHTS = ("format", "method", "scheme")
_DENSE = "float16|bfloat16|float32|fp16|bf16|fp32"
_THEN = "quantize, then `quantkit export OUT DIR --to"
#: In the order in which they are asked.
MEANT: tuple[Meant, ...] = (
    Meant(("format", "scheme"), METHODS, "{name} is a method: --method {name} --format int4."),
    Meant(("format", "method", "activations"), SCHEMES, "{name} is a scheme: --scheme {name}."),
    Meant(("method", "scheme"), FORMATS, "{name} is a format: --format {name}."),
    Meant(("target",), FORMATS, "{name} is a format: `quantkit quantize SOURCE OUT --format {name}`."),
    Meant(("target",), SCHEMES, "{name} is a scheme: `quantkit quantize SOURCE OUT --scheme {name}`."),
    Meant(_WEIGHTS, "mlx", f"{{name}} is a layout: {_THEN} mlx`."),
    Meant(_WEIGHTS, r"gguf|llama\.?cpp", f"{{name}} is a layout: {_THEN} gguf`."),
    Meant(
        (*_WEIGHTS, "target"),
        r"i?q\d+_\w+|tq[12]_0",
        f"{{name}} is a type of GGUF files: {_THEN} gguf`, which chooses the type by the format.",
    ),
    Meant(
        _WEIGHTS,
        "compressed-tensors|llm-?compressor",
        "{name} is no choice: `quantkit quantize` writes such a checkpoint wherever it can.",
    ),
    Meant(
        _WEIGHTS,
        "bnb|bitsandbytes|bnb-?4bit|nf4-?bit|qlora",
        "For 4 bits as bitsandbytes has them: --format nf4.",
    ),
    Meant(
        ("format", "scheme"),
        "w?(?P<bits>[2-8])(-?bits?)?",
        "For integers of {bits} bits: --format int{bits}.",
    ),
    Meant(("format", "scheme"), "w?1(-?bits?)?", "For 1 bit: --format binary."),
    Meant(
        ("format", "scheme"),
        r"(?P<bits>\d*\.\d+)(-?bits?|bpw)?",
        "For {bits} bits per weight on average: --bits-per-weight {bits}.",
    ),
    Meant(
        ("format",),
        f"{_DENSE}|half|none|keep|dense|(16|32)(-?bits?)?",
        "Without a rule every linear gets a format; --rule PATTERN=keep leaves those it matches as they are.",
    ),
    Meant(("method",), "quarot|spinquant|hadamard|rotat(e|ion)", "To rotate the weights first: --rotate."),
    Meant(("group size",), "-1", "For a scale per row: --group-size channel."),
    Meant(("symmetry",), "false|no|0", "With a zero-point per group: --zero-point integer."),
    Meant(("KV cache format", "activations"), f"{_DENSE}|auto", "That is the default: leave the option out."),
)


def advice_on(kind: str, name: str) -> str | None:
    """What the first row of `MEANT` that has such a name says; None if none has."""
    found = (row.of(kind, name.strip()) for row in MEANT)
    return next((advice for advice in found if advice is not None), None)


#: An option and its value, or a command, which is for a shell.
_OPTION = re.compile(r"`[^`]*`|--([\w-]+)(?: ('[^']*'|[^\s`.,;:]\S*?|\.\d+)(?=[.,;:]?(?:\s|$)))?")
#: Keyword arguments that are lists of what the option of this name has one of.
LISTS = {"rule": "rules"}


def in_python(advice: str) -> str:
    """`advice` with keyword arguments in place of options: `--format int4` is `format="int4"`."""

    def keyword(found: re.Match[str]) -> str:
        option, value = found.groups()
        if option is None:
            return found[0]
        shown = "True"
        if value is not None:
            shown = value if re.fullmatch(r"[\d.]+", value) else f'"{value.strip(chr(39))}"'
        if option in LISTS:
            return f"{LISTS[option]}=[{shown}]"
        return f"{option.replace('-', '_')}={shown}"

    return re.sub(r"(\w+=\S+) (?=\w+=)", r"\1, ", _OPTION.sub(keyword, advice))


@dataclass(frozen=True)
class Instead:
    """Options of other tools, and the option to give instead, with a value.

    `value` is an example, for values that are no name or pattern of `values`. Of a name of a `kind` the rows
    of `MEANT` may say more. `{name}` in `value` is the option of the other tool.
    """

    option: str
    value: str
    names: str
    values: Iterable[str] | str = ()
    kind: str = ""

    def advice(self, name: str, value: str) -> str:
        """What to give in place of the option `name` with this value, "" for none."""
        if self.kind and (advice := advice_on(self.kind, value)) is not None:
            return advice
        pattern = self.values if isinstance(self.values, str) else "|".join(map(re.escape, self.values))
        taken = value if value and re.fullmatch(pattern, value) else self.value.format(name=name)
        if value == str(False):
            return ""
        return f"Use {f'{self.option} {quoted(taken)}'.rstrip()}."


def quoted(value: str) -> str:
    """`value` in quotes if a shell would split it."""
    return f"'{value}'" if " " in value else value


_NUMBER, _SIZE = r"\d+", r"\d+[KMG]i?B?"
OPTIONS: tuple[Instead, ...] = (
    Instead(
        "--format",
        "int4",
        "bits bit nbits wbits w-bit w-bits q-bits weight-bits num-bits load-in-4bit quantization quant qtype",
        FORMATS,
        "format",
    ),
    Instead("--format", "int8", "load-in-8bit"),
    Instead("--method", "{name}", "awq gptq hqq smoothquant imatrix"),
    Instead("--method", "gptq", "algorithm algo quant-method", METHODS, "method"),
    Instead("--group-size", "128", "groupsize q-group-size block-size", _NUMBER, "group size"),
    Instead(
        "--calibration",
        "FILE.txt",
        "dataset data calib calib-data calib-dataset calibration-dataset",
        r".+\.(txt|jsonl|json|parquet)|hf:.+",
    ),
    Instead(
        "--calibration-samples",
        "256",
        "samples nsamples num-samples num-calibration-samples calib-size",
        _NUMBER,
    ),
    Instead("--calibration-length", "2048", "seqlen seq-len max-seq-length sequence-length", _NUMBER),
    Instead("--zero-point", "integer", "asym asymmetric zero-points", ZERO_POINTS),
    Instead("--zero-point", "none", "sym symmetric", kind="symmetry"),
    Instead("--rule", "PATTERN=keep", "ignore exclude skip modules-to-not-convert"),
    Instead("--kv-cache", "int8", "kv-cache-dtype cache-type-k kv", KV_FORMATS, "KV cache format"),
    Instead("--overwrite", "", "force yes clobber"),
    Instead("--max-new-tokens", "128", "n-predict max-tokens new-tokens", _NUMBER),
    Instead("--temperature", "1", "temp", r"[\d.]+"),
    Instead("--batch", "1", "batch-size", _NUMBER),
    Instead("--max-shard-size", "2GB", "max-size shard-size", _SIZE),
    Instead("--to", "gguf", "target outtype", kind="target"),
    Instead("--fit", "24GB", "memory vram gpu-memory max-memory", _SIZE),
    Instead("--context", "8192", "ctx-size max-model-len context-length", _NUMBER),
    Instead("--against", "SOURCE", "baseline reference original", ".+"),
)
#: Options of other tools for what is an argument here: its metavar, what to say, and their names.
ARGUMENTS: tuple[tuple[str, str, str], ...] = (
    ("SOURCE", "SOURCE is the first argument.", "model model-path model-id input source"),
    ("DIR", "DIR is the first argument.", "model model-path model-id input"),
    ("OUT", "OUT is an argument, not an option.", "output out output-dir save save-path outfile"),
    ("PROMPT", "PROMPT is the second argument.", "prompt"),
)
#: Commands of other tools by that of this one.
COMMANDS: Mapping[str, str] = {
    "run": "generate",
    "chat": "generate --chat",
    "complete": "generate",
    "benchmark": "bench",
    "evaluate": "eval",
    "perplexity": "eval",
    "ppl": "eval",
    "compare": "eval",
    "info": "inspect",
    "show": "inspect",
    "upload": "push",
    "publish": "push",
    "card": "report",
    "check": "verify",
    "estimate": "plan",
    "schemes": "formats --schemes",
    "env": "doctor",
    "import": "convert",
    "compress": "quantize",
}


def option_meant(given: str, value: str, options: Iterable[str], arguments: Iterable[str] = ()) -> str | None:
    """What to say of an option `given` with a value to a command with these; None if no table has it."""
    name, options, arguments = given.lstrip("-").replace("_", "-").lower(), set(options), set(arguments)
    for row in OPTIONS:
        if name in row.names.split() and row.option in options:
            return row.advice(name, value.strip()) or None
    found = (text for metavar, text, names in ARGUMENTS if metavar in arguments and name in names.split())
    return next(found, None)
