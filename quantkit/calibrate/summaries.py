"""Names and summaries of the methods. Imports no torch, as `--help` shows them."""

from dataclasses import dataclass

from quantkit import meant


@dataclass(frozen=True)
class Summary:
    """Summary of a method: one or two words for `--help`, and one line."""

    short: str
    line: str


#: Every method of `methods.METHODS`, in its order.
SUMMARIES: dict[str, Summary] = {
    "rtn": Summary("plain rounding", "plain rounding to nearest, one pass"),
    "mse": Summary("searched", "scales searched for the smallest squared error, data-free"),
    "hqq": Summary(
        "half-quadratic, int formats",
        "half-quadratic search for a small l_0.7 error, data-free, int formats only",
    ),
    "imatrix": Summary("searched, with data", "as mse, errors weighed by the mean square of their input"),
    "awq": Summary(
        "scaled, with data", "as imatrix on weights whose input features are scaled by how much they matter"
    ),
    "smoothquant": Summary(
        "smoothed, with data",
        "as imatrix on weights whose input features are scaled by the largest magnitudes of both",
    ),
    "gptq": Summary(
        "compensated, with data", "as imatrix, each column rounded to make good for the errors before it"
    ),
    "best": Summary(
        "the strongest, with data",
        "gptq on weights corrected for the input error, then coordinate descent on codes and scales",
    ),
    "signround": Summary(
        "best, then learned by block, with data",
        "as best, then the codes of a block learned from its outputs, evenly spaced formats only",
    ),
    "distill": Summary(
        "best, then trained against the original's predictions, below 4 bits",
        "as best, then codes, scales, zero-points and norms trained end to end against the original's logits",
    ),
}
meant.METHODS.give(SUMMARIES)

#: Default method.
DEFAULT_METHOD = "mse"
