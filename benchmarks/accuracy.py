"""Divergence from the original of a model in many schemes: the tables of docs/accuracy.md.

    python benchmarks/accuracy.py MODEL --text books.txt --text docs.txt [--max-windows 8]

Quantizes MODEL once per row into a temporary directory, evaluates all against it in float32 on windows of
1024 tokens, and prints bits per weight of the packed linears and KL mean per text.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from quantkit.eval.evaluate import evaluate_many
from quantkit.model.quantize import quantize

#: What `quantize` is given, by row.
ROWS: dict[str, dict[str, Any]] = {
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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / name.replace(" ", "-") for name in ROWS]
        for output, options in zip(outputs, ROWS.values(), strict=True):
            quantize(arguments.model, output, **options)
        reports = evaluate_many(
            outputs, against=arguments.model, texts=arguments.text, max_windows=arguments.max_windows
        )
    for name, report in zip(ROWS, reports, strict=True):
        figures = report.to_dict()
        divergences = " / ".join(f"{text['kl_mean']:.5f}" for text in figures["texts"].values())
        print(f"{name:26} {figures['bits_per_weight']['linears']:.3f}  {divergences}")


if __name__ == "__main__":
    main()
