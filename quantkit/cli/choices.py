"""Names of options whose tables are in modules that import torch, for `--help` and completion.

`tests/cli/test_help.py` compares them with the tables.
"""

#: `devices.KINDS`, and a GPU if there is one.
DEVICES = ("auto", "cpu", "cuda")
#: `eval.models.DTYPES`.
DTYPES = ("float32", "bfloat16", "float16")
#: `checkpoint.engines.SERVERS`.
SERVERS = ("vllm", "sglang")
#: `targets.table.TARGETS`.
TARGETS = ("gptq", "awq", "gguf", "mlx")
#: `bench.speed.MODES`.
MODES = ("eager", "flat", "cuda-graph")


def listed(names: tuple[str, ...], last: str = "or") -> str:
    """`a, b or c`."""
    return f"{', '.join(names[:-1])} {last} {names[-1]}"
