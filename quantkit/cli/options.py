"""Options that several commands take, and what they mean."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.calibrate.data.calibration_options import (
    DEFAULT_LENGTH,
    DEFAULT_SAMPLES,
    CalibrationOptions,
)
from quantkit.calibrate.summaries import DEFAULT_METHOD, SUMMARIES
from quantkit.cli import completion
from quantkit.cli.choices import DEVICES, DTYPES, SERVERS, listed
from quantkit.cli.parsing import parse_list, parse_size, parse_time, shown_size
from quantkit.errors import UsageError
from quantkit.packing.presets import (
    ACTIVATIONS,
    DEFAULT_FORMAT,
    KV_SCALES,
    MENU_NAMES,
    PACKING_NAMES,
    PRESETS,
    SCALE_DTYPE_NAMES,
    SCHEMES,
    ZERO_POINT_NAMES,
)
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.runtime.cache.kv_formats import KV_FORMATS

if TYPE_CHECKING:
    from quantkit.quantization.allocate.budget import Budget

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A checkpoint directory, a GGUF file, or a model id on the hub.",
        autocompletion=completion.models,
    ),
]
OutDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="OUT",
        readable=False,  # typer would refuse what cannot be listed in its own words
        help="The directory to write; new, empty or, with --resume or --overwrite, an earlier output.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output.")]
CheckOutput = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        help="Run the result on a fixed prompt and store its logits, with which 'verify' compares.",
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A checkpoint directory, packed or not, or a model id on the hub.",
        autocompletion=completion.models,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="DIR...",
        help="Checkpoint directories, packed or not, or model ids on the hub.",
        autocompletion=completion.models,
    ),
]
KvCache = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        help=f"Format of the KV cache: {', '.join(KV_FORMATS)}.",
        show_default="the dtype",
        autocompletion=completion.names(*KV_FORMATS),
    ),
]
PackedDirectory = Annotated[
    Path,
    # Not readable as typer understands it: what cannot be listed is said of the files in it.
    typer.Argument(
        metavar="DIR", exists=True, file_okay=False, readable=False, help="A packed checkpoint directory."
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        "-f",
        help=f"Number format: {', '.join(PRESETS)}.",
        show_default=DEFAULT_FORMAT,
        autocompletion=completion.names(*PRESETS),
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        help=f"How weights are rounded: {', '.join(f'{k} ({v.short})' for k, v in SUMMARIES.items())}; "
        "or two, such as smoothquant,gptq.",
        show_default=DEFAULT_METHOD,
        autocompletion=completion.lists(*SUMMARIES),
    ),
]
GroupSizeText = Annotated[
    str | None,
    typer.Option(
        "--group-size",
        "-g",
        help="Weights of a row that share a scale, 'channel' for a whole row, 'tensor' for all rows, or a "
        "block such as 128x128, rows by columns.",
        show_default="by format",
    ),
]
ZeroPointKind = Annotated[
    str | None,
    typer.Option(
        "--zero-point",
        help=f"Of int formats, per group: {', '.join(ZERO_POINT_NAMES)}.",
        show_default="none",
        autocompletion=completion.names(*ZERO_POINT_NAMES),
    ),
]
ScaleDtype = Annotated[
    str | None,
    typer.Option(
        "--scale-dtype",
        help=f"Of the scales: {', '.join(SCALE_DTYPE_NAMES)}; e4m3 has a float32 factor per tensor.",
        show_default="by format and weights",
        autocompletion=completion.names(*SCALE_DTYPE_NAMES),
    ),
]
PackingText = Annotated[
    str | None,
    typer.Option(
        "--packing",
        help="bits (what kernels want), radix (codes as digits of bytes: ternary in 1.6 bits, not 2) or "
        "stream (int3, int5, int6 and int7 as compressed-tensors, which vLLM and transformers read).",
        show_default="bits",
        autocompletion=completion.names(*PACKING_NAMES),
    ),
]
Activations = Annotated[
    str | None,
    typer.Option(
        "--activations",
        help=f"Round the inputs of linears too: {', '.join(ACTIVATIONS)}.",
        show_default="none",
        autocompletion=completion.names(*ACTIVATIONS),
    ),
]
SchemeName = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        help=f"Format, group size and activations by a name of llm-compressor: {', '.join(SCHEMES)}.",
        autocompletion=completion.names(*SCHEMES),
    ),
]
BitsPerWeight = Annotated[
    float | None,
    typer.Option(
        "--bits-per-weight",
        help="Choose the formats: those that cost the least accuracy in so many bits per weight, scales "
        "included. Sensitivities are measured on --calibration texts, once.",
    ),
]
MillisecondsPerToken = Annotated[
    float | None,
    typer.Option(
        "--milliseconds-per-token",
        help="Choose the formats in the same way: those that cost the least accuracy in so much time of the "
        "linears' products, one token at a time, as measured on a GPU.",
    ),
]
GpuName = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="With --milliseconds-per-token, the GPU whose measured times count, such as nvidia_h200.",
        show_default="the one here",
    ),
]
AllocatedFormats = Annotated[
    str | None,
    typer.Option(
        "--formats",
        help="With one of these budgets, what to choose from, comma-separated: FORMAT, FORMAT:GROUP, a name "
        "of --scheme such as W8A8, or engine (int4, int8, fp8, mxfp8, mxfp4 and nvfp4 as other engines read "
        "and decode them fast), fast (ternary to int8, fp6, fp8 and the like too, which only quantkit reads) "
        "or all (book4 too, which decodes slowly).",
        show_default="engine, fast for bits below it, all for a time",
        autocompletion=completion.lists(*MENU_NAMES, *PRESETS, *SCHEMES),
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help=f"The result must load in {listed(SERVERS)}, of the newest version known or such as "
        "vllm==0.26.0. With a budget, formats are chosen among those that it reads.",
        autocompletion=completion.names(*SERVERS),
    ),
]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="TOML file of rules.")]
LmHead = Annotated[
    str | None,
    typer.Option(
        "--lm-head",
        help="Format for lm_head, which stays dense otherwise.",
        autocompletion=completion.names(*PRESETS),
    ),
]
Embeddings = Annotated[
    str | None,
    typer.Option(
        "--embeddings",
        metavar="FORMAT",
        help="FORMAT[:GROUP][:METHOD] for the token embedding, which stays dense otherwise. A head that is "
        "tied to it gets the same table. Only quantkit reads the result.",
    ),
]
KvScales = Annotated[
    str | None,
    typer.Option(
        "--kv-scales",
        metavar="FORMAT",
        help="Measure and store scales of keys and values for a KV cache of vLLM or SGLang in this format: "
        f"{', '.join(KV_SCALES)}. Takes calibration data.",
        show_default="none",
        autocompletion=completion.names(*KV_SCALES),
    ),
]
DenseEmbeddings = Annotated[
    bool,
    typer.Option(
        "--dense-embeddings",
        help="Store the token embedding as float32, which tools other than quantkit can read.",
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="PATTERN=FORMAT[:GROUP][:METHOD] or PATTERN=keep, where PATTERN matches names of linears and "
        "* any text; repeatable, the first match wins.",
    ),
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="Rotate the weights by Hadamard matrices first, which spreads outliers. The model computes the "
        "same.",
    ),
]
ModelFree = Annotated[
    bool,
    typer.Option(
        "--model-free",
        help="Names and shapes decide what is a linear: for models that transformers does not know, and for "
        "code of a repository, which is never run. Only methods without data.",
    ),
]
_TEXTS: Any = {
    "metavar": "TEXTS[:SAMPLES],...",
    "help": "For methods with data: files (.txt, .jsonl, .json, .parquet) or data sets of the hub "
    "(hf:OWNER/NAME).",
}
Calibration = Annotated[
    str | None, typer.Option("--calibration", show_default="a text that comes with quantkit", **_TEXTS)
]
CalibrationAgain = Annotated[
    str | None, typer.Option("--calibration", show_default="the samples that DIR was made with", **_TEXTS)
]
CalibrationSamples = Annotated[
    int | None,
    typer.Option("--calibration-samples", help="How many samples.", show_default=str(DEFAULT_SAMPLES)),
]
CalibrationLength = Annotated[
    int | None,
    typer.Option("--calibration-length", help="Tokens of a sample.", show_default=str(DEFAULT_LENGTH)),
]
Time = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="TIME",
        help="Of --method distill: how long the training takes, such as 30m or 2h. Several GPUs, one for "
        "each process of torchrun, make more steps in it.",
        show_default="10m, and more for a model of more than 100 M weights",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", help="Of --method distill: the number of steps, in place of a time."),
]
Seed = Annotated[int, typer.Option("--seed", help="Which samples of the texts are drawn.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="auto (a GPU if there is one), cpu or cuda.",
        autocompletion=completion.names(*DEVICES),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help=f"Of activations: {', '.join(DTYPES)}, or auto (as config.json).",
        autocompletion=completion.names("auto", *DTYPES),
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say which kernels run and why not others.")]
EveryLayer = Annotated[bool, typer.Option("--every-layer", help="A line per layer, not per kind of layer.")]
AllowAutoMap = Annotated[
    bool,
    typer.Option("--allow-auto-map", help="Accept a config that names remote code; it is never run."),
]
RowsOfX = Annotated[str, typer.Option("--m", help="Rows of x, comma-separated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ShardSize = Annotated[
    str, typer.Option("--max-shard-size", help="Largest output file, such as 500MB or 2GB.")
]


#: The default.
SHARD_SIZE = shown_size(QuantizeOptions.max_shard_bytes)


@dataclass(frozen=True)
class QuantizeArguments:
    """The command line of `plan` and `quantize`, an option per field."""

    format: Format = None
    method: MethodName = None
    group_size: GroupSizeText = None
    zero_point: ZeroPointKind = None
    scale_dtype: ScaleDtype = None
    packing: PackingText = None
    activations: Activations = None
    scheme: SchemeName = None
    recipe: RecipeFile = None
    lm_head: LmHead = None
    embeddings: Embeddings = None
    kv_scales: KvScales = None
    rule: Rules = None
    rotate: Rotate = False
    model_free: ModelFree = False
    bits_per_weight: BitsPerWeight = None
    milliseconds_per_token: MillisecondsPerToken = None
    gpu: GpuName = None
    formats: AllocatedFormats = None
    engine: EngineName = None
    calibration: Calibration = None
    calibration_samples: CalibrationSamples = None
    calibration_length: CalibrationLength = None
    seed: Seed = CalibrationOptions.seed
    time: Time = None
    steps: Steps = None
    device: Device = QuantizeOptions.device
    max_shard_size: ShardSize = SHARD_SIZE
    allow_auto_map: AllowAutoMap = False
    every_layer: EveryLayer = False
    json: Json = False

    def to_budget(self) -> "Budget | None":
        """What linears without a rule may cost, if that was asked for."""
        from quantkit.quantization.allocate import budget

        if self.gpu is not None and self.milliseconds_per_token is None:
            raise UsageError("--gpu says whose time --milliseconds-per-token counts; give that too.")
        if self.bits_per_weight is not None and self.milliseconds_per_token is not None:
            raise UsageError(
                "--bits-per-weight and --milliseconds-per-token are two budgets; formats are chosen within "
                "one. Leave one out."
            )
        limit: budget.Limit
        if self.bits_per_weight is not None:
            limit = budget.BitsPerWeight(self.bits_per_weight)
        elif self.milliseconds_per_token is not None and self.gpu is not None:
            limit = budget.MillisecondsPerToken(self.milliseconds_per_token, self.gpu)
        elif self.milliseconds_per_token is not None:
            limit = budget.MillisecondsPerToken.here(self.milliseconds_per_token)
        elif self.formats is not None:
            raise UsageError(
                "--formats is what --bits-per-weight and --milliseconds-per-token choose from; give one of "
                "them too, or use --format."
            )
        else:
            return None
        return budget.Budget(
            limit, None if self.formats is None else tuple(parse_list(self.formats, "--formats"))
        )

    def to_options(
        self, *, resume: bool = False, overwrite: bool = False, check: bool = False
    ) -> QuantizeOptions:
        """The options of a run. `UsageError` for texts that are none."""
        from quantkit.recipes.recipe import parse_group_size, parse_packing, parse_zero_point

        budget = self.to_budget()
        recipe = RecipeOptions(
            format=self.format,
            method=self.method,
            group_size=parse_group_size(self.group_size),
            zero_point=None if self.zero_point is None else parse_zero_point(self.zero_point),
            scale_dtype=self.scale_dtype,
            packing=None if self.packing is None else parse_packing(self.packing),
            activations=self.activations,
            scheme=self.scheme,
            recipe=self.recipe,
            lm_head=self.lm_head,
            embeddings=self.embeddings,
            kv_scales=self.kv_scales,
            rules=tuple(self.rule or ()),
            rotate=self.rotate,
            model_free=self.model_free,
        )
        calibration = CalibrationOptions(
            self.calibration, self.calibration_samples, self.calibration_length, self.seed
        )
        return QuantizeOptions(
            recipe=recipe,
            budget=budget,
            calibration=calibration,
            device=self.device,
            max_shard_bytes=parse_size(self.max_shard_size),
            allow_auto_map=self.allow_auto_map,
            resume=resume,
            overwrite=overwrite,
            check=check,
            engine=self.engine,
            distillation=DistillOptions(self.steps, None if self.time is None else parse_time(self.time)),
        )
