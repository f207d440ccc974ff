"""Divergence from the original of a model in many schemes: the tables of docs/accuracy.md.

    python benchmarks/accuracy.py MODEL --text books.txt --text docs.txt [--max-windows 8] [--row int4]

Quantizes MODEL once per row into a temporary directory, evaluates all against it in float32 on windows of
1024 tokens, and prints bits per weight of the packed linears and KL mean per text. With `--row`, only of the
rows whose names contain what it is given.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.evaluate import evaluate_many
from quantkit.quantizing import quantize

#: What `quantize` is given, by row.
ROWS: dict[str, dict[str, Any]] = {
    "int8 channel": {"format": "int8"},
    "int8 tensor": {"format": "int8", "group_size": "tensor"},
    "int8 tensor rtn": {"format": "int8", "group_size": "tensor", "method": "rtn"},
    "fp8 channel": {"format": "fp8"},
    "fp8 tensor": {"format": "fp8", "group_size": "tensor"},
    "fp8 tensor rtn": {"format": "fp8", "group_size": "tensor", "method": "rtn"},
    "int8 rtn": {"format": "int8", "method": "rtn"},
    "fp6 channel rtn": {"format": "fp6", "group_size": "channel", "method": "rtn"},
    "int4 rtn": {"format": "int4", "method": "rtn"},
    "int4 integer zero rtn": {"format": "int4", "zero_point": "integer", "method": "rtn"},
    "int4 integer zero": {"format": "int4", "zero_point": "integer"},
    "int6 integer zero": {"format": "int6", "zero_point": "integer"},
    "int6": {"format": "int6"},
    "int5 integer zero": {"format": "int5", "zero_point": "integer"},
    "int5": {"format": "int5"},
    "nvfp4": {"format": "nvfp4"},
    "book4 g16": {"format": "book4", "group_size": 16},
    "nf4 g32 e4m3": {"format": "nf4", "group_size": 32, "scale_dtype": "e4m3"},
    "book4": {"format": "book4"},
    "int4 g32 e4m3": {"format": "int4", "group_size": 32, "scale_dtype": "e4m3"},
    "mxfp4": {"format": "mxfp4"},
    "int3 g32 e4m3": {"format": "int3", "group_size": 32, "scale_dtype": "e4m3"},
    "int3 g32 e4m3 integer zero": {
        "format": "int3",
        "group_size": 32,
        "scale_dtype": "e4m3",
        "zero_point": "integer",
    },
    "int2 g16 e4m3": {"format": "int2", "group_size": 16, "scale_dtype": "e4m3"},
    "int2 g32 e4m3": {"format": "int2", "group_size": 32, "scale_dtype": "e4m3"},
    "int2 g64 e4m3": {"format": "int2", "group_size": 64, "scale_dtype": "e4m3"},
    "int2 float zero g64": {"format": "int2", "zero_point": "float", "group_size": 64},
    "int2 float zero": {"format": "int2", "zero_point": "float"},
    "binary-residual": {"format": "binary-residual"},
    "ternary g16 e4m3 radix": {
        "format": "ternary",
        "group_size": 16,
        "scale_dtype": "e4m3",
        "packing": "radix",
    },
    "ternary g32 e4m3 radix": {
        "format": "ternary",
        "group_size": 32,
        "scale_dtype": "e4m3",
        "packing": "radix",
    },
    "ternary": {"format": "ternary"},
    "binary": {"format": "binary"},
    "binary-rank1": {"format": "binary-rank1"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--max-windows", type=int, default=8)
    parser.add_argument("--row", action="append", default=[])
    arguments = parser.parse_args()
    rows = {
        name: options
        for name, options in ROWS.items()
        if not arguments.row or any(part in name for part in arguments.row)
    }
    if not rows:
        parser.error(f"no row is called so; there are {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / name.replace(" ", "-") for name in rows]
        for output, options in zip(outputs, rows.values(), strict=True):
            quantize(arguments.model, output, **options)
        reports = evaluate_many(
            outputs,
            EvalOptions(
                texts=tuple(arguments.text),
                against=arguments.model,
                window=1024,
                max_windows=arguments.max_windows,
            ),
        )
    for name, report in zip(rows, reports, strict=True):
        figures = report.to_dict()
        divergences = " / ".join(f"{text['kl_mean']:.5f}" for text in figures["texts"].values())
        print(f"{name:26} {figures['bits_per_weight']['linears']:.3f}  {divergences}")


if __name__ == "__main__":
    main()
