"""Recognize Llama 3's scaled rotary embeddings by the factors in a file.

llama.cpp stores the divisor of each frequency, not the parameters behind them, which config.json needs.
"""

import math
from collections.abc import Sequence
from typing import Any

#: Thresholds of Llama 3's frequency factors, in every model that has them.
LOW, HIGH = 1.0, 4.0
#: Context lengths before extension.
_CONTEXTS = (8192, 4096, 2048, 16384, 32768)


def llama3_parameters(factors: Sequence[float], base: float) -> dict[str, Any] | None:
    """Return `rope_parameters` that divide the frequencies base ** (-2 i / D) by these D / 2 factors.

    Returns None if no parameters of Llama 3 give these divisors.
    """
    if not factors or not base > 1 or not all(math.isfinite(one) and one > 0 for one in factors):
        return None
    # The factors were rounded to float32.
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
    """Return Llama 3's divisors of the `count` rotary frequencies to the `base`: 1 for the fast ones.

    Slow ones are divided by `factor`, those between by less. `context` is its length before extension.
    """
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
