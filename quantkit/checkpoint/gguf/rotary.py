"""Rotary embeddings that are scaled as those of Llama 3: recognized by the factors that a file has.

llama.cpp stores by what each frequency is divided, and not the numbers that this follows from. config.json
has those numbers.
"""

import math
from collections.abc import Sequence
from typing import Any

#: The factors of Llama 3 and their thresholds, in every model that has them.
LOW, HIGH = 1.0, 4.0
#: Context lengths before they were extended.
_CONTEXTS = (8192, 4096, 2048, 16384, 32768)


def llama3_parameters(factors: Sequence[float], base: float) -> dict[str, Any] | None:
    """`rope_parameters` that divide the frequencies base ** (-2 i / D) by these D / 2 factors.

    None where no rule of Llama 3 gives them.
    """
    if not factors or not base > 1 or not all(math.isfinite(one) and one > 0 for one in factors):
        return None
    # They were float32 numbers.
    factor = float(f"{max(factors):.6g}")
    for context in _CONTEXTS:
        expected = llama3_factors(len(factors), base, factor, context)
        if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "rope_theta": base,
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": context,
            }
    return None


def llama3_factors(count: int, base: float, factor: float, context: int) -> list[float]:
    """The `count` factors that Llama 3 has for a context of this length before it was extended."""
    found = []
    for i in range(count):
        turns = context * base ** (-i / count) / (2 * math.pi)
        if turns > HIGH:
            found.append(1.0)
        elif turns < LOW:
            found.append(factor)
        else:
            smooth = (turns - LOW) / (HIGH - LOW)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found
