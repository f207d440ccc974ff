"""Names of other tools, and of other options of this one: what a user who gives them is likely to mean.

Slips within one table are found by `errors.unknown_name`. These rows are for names that stand elsewhere.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantkit.calibrate.summaries import SUMMARIES
from quantkit.errors import QuantkitError, UnknownName, causes
from quantkit.packing.presets import DEFAULT_FORMAT, PRESETS, SCHEMES


@dataclass(frozen=True)
class Meant:
    """Names that are given for one of `kinds` of things, and what to do instead.

    `names` are those of a table, or a pattern of the whole name. `{name}` in `advice` is the name as the
    table has it, `{bits}` and the like what that group of the pattern matched.
    """

    kinds: tuple[str, ...]
    names: Mapping[str, object] | str
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
    Meant(
        ("format", "scheme"),
        SUMMARIES,
        f"{{name}} is a method: --method {{name}} --format {DEFAULT_FORMAT}.",
    ),
    Meant(("format", "method", "activations"), SCHEMES, "{name} is a scheme: --scheme {name}."),
    Meant(("method", "scheme"), PRESETS, "{name} is a format: --format {name}."),
    Meant(("target",), PRESETS, "{name} is a format: `quantkit quantize SOURCE OUT --format {name}`."),
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
    Meant(
        ("format",),
        f"{_DENSE}|half|none|keep|dense",
        "Without a rule every linear gets a format; --rule PATTERN=keep leaves those it matches as they are.",
    ),
    Meant(("method",), "quarot|spinquant|hadamard|rotat(e|ion)", "To rotate the weights first: --rotate."),
    Meant(("KV cache format", "activations"), f"{_DENSE}|auto", "That is the default: leave the option out."),
)


def explained(error: QuantkitError) -> str:
    """The message of `error`, with what the name that no table has is likely to mean.

    A row of `MEANT` says more than a name that looks alike, so it comes in place of that.
    """
    message = str(error)
    unknown = next(
        (one.unknown for one in causes(error) if isinstance(one, QuantkitError) and one.unknown), None
    )
    advice = None if unknown is None else advice_on(unknown)
    if unknown is None or advice is None:
        return message
    if unknown.suggestion and unknown.suggestion in message:
        return message.replace(unknown.suggestion, advice)
    return f"{message} {advice}"


def advice_on(unknown: UnknownName) -> str | None:
    """What the first row of `MEANT` that has such a name says; None if none has."""
    found = (row.of(unknown.kind, unknown.name.strip()) for row in MEANT)
    return next((advice for advice in found if advice is not None), None)


#: What does here what options of other tools do, and their names. The first word is the option.
OPTIONS: Mapping[str, str] = {
    "--format int4": "bits bit wbits w-bit q-bits weight-bits num-bits load-in-4bit quantization quant qtype",
    "--method {name}": "awq gptq hqq smoothquant imatrix",
    "--method gptq": "algorithm algo quant-method",
    "--group-size 128": "groupsize q-group-size block-size",
    "--calibration FILE.txt": "dataset data calib calib-data calib-dataset calibration-dataset",
    "--calibration-samples 256": "samples nsamples num-samples num-calibration-samples calib-size",
    "--calibration-length 2048": "seqlen seq-len max-seq-length sequence-length",
    "--zero-point integer": "sym asym symmetric asymmetric zero-points",
    "--rule PATTERN=keep": "ignore exclude skip modules-to-not-convert",
    "--kv-cache int8": "kv-cache-dtype cache-type-k kv",
    "--overwrite": "force yes clobber",
    "--max-new-tokens 128": "n-predict max-tokens new-tokens",
    "--temperature 1": "temp",
    "--batch 1": "batch-size",
    "--max-shard-size 2GB": "max-size shard-size",
    "--to gguf": "target outtype",
    "--fit 24GB": "memory vram gpu-memory max-memory",
    "--context 8192": "ctx-size max-model-len context-length",
    "--against SOURCE": "baseline reference original",
}
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


def option_meant(given: str, options: Iterable[str], arguments: Iterable[str]) -> str | None:
    """What to say of an option `given` to a command with these; None if no table has it."""
    name, options, arguments = given.lstrip("-").replace("_", "-").lower(), set(options), set(arguments)
    for option, names in OPTIONS.items():
        if name in names.split() and option.split()[0] in options:
            return f"Use {option.format(name=name)}."
    found = (text for metavar, text, names in ARGUMENTS if metavar in arguments and name in names.split())
    return next(found, None)
