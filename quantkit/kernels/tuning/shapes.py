"""Shapes [N, K] of the linears of well-known models, for tuning and benchmarks."""

import re
from collections.abc import Iterable, Mapping

from quantkit.errors import unknown_name

#: [N, K] of linears by model: as in transformers, and with q, k, v and gate, up fused, as in engines.
MODEL_SHAPES: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "llama3-8b": {
        "q": (4096, 4096),
        "kv": (1024, 4096),
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "up": (14336, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "llama3-70b": {
        "q": (8192, 8192),
        "kv": (1024, 8192),
        "qkv": (10240, 8192),
        "o": (8192, 8192),
        "up": (28672, 8192),
        "gate_up": (57344, 8192),
        "down": (8192, 28672),
    },
    "qwen2.5-7b": {
        "q": (3584, 3584),
        "kv": (512, 3584),
        "qkv": (4608, 3584),
        "o": (3584, 3584),
        "up": (18944, 3584),
        "gate_up": (37888, 3584),
        "down": (3584, 18944),
    },
    "mixtral-8x7b": {
        "q": (4096, 4096),
        "kv": (1024, 4096),
        "o": (4096, 4096),
        "up": (14336, 4096),
        "down": (4096, 14336),
    },
}
_SIDES = re.compile(r"([1-9]\d{0,7})x([1-9]\d{0,7})")


def shapes_named(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return {name of a linear: (N, K)}; raise `UsageError` for an unknown name.

    Each of `names` is a model (llama3-8b: all its linears), a linear (llama3-8b.down), or NxK (4096x14336).
    """
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        model, _, linear = name.partition(".")
        sides = _SIDES.fullmatch(name)
        # `qwen2.5-7b` itself has a dot.
        known = next(
            (known for known in MODEL_SHAPES if name == known or name.startswith(f"{known}.")), model
        )
        linear = name[len(known) + 1 :]
        if sides is not None:
            found[name] = int(sides[1]), int(sides[2])
        elif known in MODEL_SHAPES and not linear:
            found |= {f"{known}.{part}": shape for part, shape in MODEL_SHAPES[known].items()}
        elif linear in MODEL_SHAPES.get(known, {}):
            found[name] = MODEL_SHAPES[known][linear]
        else:
            linears = ", ".join(MODEL_SHAPES["llama3-8b"])
            raise unknown_name(
                "shape",
                name,
                MODEL_SHAPES,
                remedy=f"One linear of them is such as llama3-8b.down (of {linears}); or give NxK such as "
                "4096x14336.",
            )
    return found
