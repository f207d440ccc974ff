"""Model class for lm-evaluation-harness, the optional extra `eval`; importing this module imports it.

`lm_eval.simple_evaluate(model="quantkit", model_args={"pretrained": DIR})` works after the import.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from quantkit.eval.models import dtype_named
from quantkit.model.tokenizer import tokenizer
from quantkit.runtime.load import load_language_model

#: Called with the number of answered requests and of all requests.
Report = Callable[[int, int], None]


@register_model("quantkit")
class QuantkitLM(HFLM):  # type: ignore[misc]
    """Causal language model, packed or dense, for tasks: requests run in batches of similar length."""

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        dtype: str | torch.dtype = "float32",
        batch_size: int | str = 1,
        **options: Any,
    ) -> None:
        """Load `pretrained`, a directory or hub id, as `quantkit.load` does; `options` are HFLM's."""
        named = dtype_named(dtype) if isinstance(dtype, str) else dtype
        model = load_language_model(pretrained, device=device or "auto", dtype=named)
        super().__init__(pretrained=model, tokenizer=tokenizer(pretrained), batch_size=batch_size, **options)
        #: Replaces lm-eval's own progress bars, if set.
        self.report: Report | None = None

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        return super().loglikelihood(requests, disable_tqdm=self._counted(requests) or disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        return super().loglikelihood_rolling(requests, disable_tqdm=self._counted(requests) or disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        return super().generate_until(requests, disable_tqdm=self._counted(requests) or disable_tqdm)

    def _counted(self, requests: Sequence[Any]) -> bool:
        """Count the answers to `requests` if there is a `report` to call; return True if there is.

        Takes the place of lm-eval's answer cache.
        """
        if self.report is not None:
            self.set_cache_hook(_Counter(len(requests), self.report))
        return self.report is not None


class _Counter:
    """Takes the place of lm-eval's answer cache: calls `report(done, total)` after each answer."""

    def __init__(self, total: int, report: Report) -> None:
        self.done, self.total, self.report = 0, total, report

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        self.done += 1
        self.report(self.done, self.total)
