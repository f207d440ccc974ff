"""How commands are parsed and shown: options in groups, and what is meant by names that there are not."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand, TyperGroup

from quantkit.meant import COMMANDS, option_meant

#: Groups of the options of a command, in this order. What is in none comes last.
_QUANTIZE: Mapping[str, str] = {
    "Formats and methods": "format method group-size zero-point scale-dtype packing activations scheme "
    "rotate kv-scales",
    "Which layers": "rule recipe lm-head embeddings model-free",
    "Formats chosen within a budget": "bits-per-weight milliseconds-per-token gpu formats engine",
    "Calibration and training": "calibration calibration-samples calibration-length seed time steps",
    "Output": "resume overwrite check max-shard-size every-layer json",
}
GROUPS: Mapping[str, Mapping[str, str]] = {
    "quantize": _QUANTIZE,
    "plan": {**_QUANTIZE, "Formats that fit a memory": "fit context batch kv-cache"},
    "eval": {
        "What is measured": "against text own-text tasks task-path limit window stride max-windows "
        "noise-floor per-block",
        "Output": "json report work logits-space verbose",
    },
    "bench": {
        "Speed": "against batch prompt new-tokens mode repeats text seed profile",
        "Latency under load": "serve-like rate requests prompt-range answer-range",
        "Output": "json report",
    },
}
#: Examples of a command, shown below its options.
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "quantize": (
        "quantkit quantize Qwen/Qwen3-0.6B int4 --format int4 --method gptq",
        "quantkit quantize MODEL fp8 --scheme FP8_DYNAMIC",
        "quantkit quantize MODEL mixed --bits-per-weight 4.5",
    ),
    "convert": ("quantkit convert GPTQ_MODEL out",),
    "export": ("quantkit export int4 int4-gguf --to gguf",),
    "plan": ("quantkit plan MODEL --format int4", "quantkit plan MODEL --fit 24GB --context 32768"),
    "verify": ("quantkit verify int4", "quantkit verify int4 --engine vllm"),
    "eval": ("quantkit eval int4 int8 --against MODEL --text wiki.txt --report report",),
    "bench": (
        "quantkit bench int4 --against MODEL --report report",
        "quantkit bench int4 --serve-like --rate 1,4",
    ),
    "generate": ('quantkit generate int4 "Once upon a time" -n 50',),
    "doctor": ("quantkit doctor", "quantkit doctor int4 --reasons"),
    "demo": ("quantkit demo MODEL --text wiki.txt --formats int8,int4",),
    "merge": ("quantkit merge int4 ADAPTER merged --text wiki.txt",),
    "inspect": ("quantkit inspect int4", "quantkit inspect model.gguf"),
    "report": ("quantkit report int4 --eval report/report.json --bench report/bench.json",),
    "push": ("quantkit push int4 ORG/NAME --card card --dry-run",),
    "tune": ("quantkit tune int4", "quantkit tune --shapes llama3-8b --formats int4"),
    "formats": ("quantkit formats", "quantkit formats nf4 --codes"),
    "methods": ("quantkit methods",),
}


class Command(TyperCommand):
    """A command whose help has its options in groups, and which knows the options of other tools."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _naming_options(self, tuple(args)):
            return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        titles = {name: title for title, of in GROUPS.get(self.name or "", {}).items() for name in of.split()}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {title: [] for title in (*dict.fromkeys(titles.values()), "Options")}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            name = max(parameter.opts, key=len).lstrip("-")
            title = titles.get(name, "Options") if parameter.param_type_name == "option" else "Arguments"
            if record is not None:
                sections[title].append(record)
        if titles:
            sections["Other options"] = sections.pop("Options")
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        examples = EXAMPLES.get(self.name or "", ())
        if examples:
            with formatter.section("Examples" if len(examples) > 1 else "Example"):
                for line in examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class Group(TyperGroup):
    """The commands, which are also known by the names that other tools give theirs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _naming_options(self, tuple(args)):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        meant = COMMANDS.get(args[0].lower())
        if meant is not None and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)


@contextmanager
def _naming_options(command: TyperCommand | TyperGroup, args: Sequence[str]) -> Iterator[None]:
    """Say in the error for an option that `command` has not, which of its options does that."""
    try:
        yield
    except Exception as caught:
        error: Any = caught
        # `NoSuchOption` of click, or of the copy that newer versions of typer bring.
        if type(caught).__name__ == "NoSuchOption":
            options = (name for one in command.params for name in one.opts)
            arguments = (str(one.metavar) for one in command.params)
            value = _value(error.option_name, args)
            meant = option_meant(error.option_name, value, options, arguments)
            if meant is not None:
                error.message, error.possibilities = f"{error.message}. {meant}", None
        raise


def _value(option: str, args: Sequence[str]) -> str:
    """What the command line `args` gives for `option`: "" for nothing."""
    for arg, after in zip(args, (*args[1:], ""), strict=True):
        name, equals, value = arg.partition("=")
        if name == option:
            return value if equals else "" if after.startswith("--") else after
    return ""
