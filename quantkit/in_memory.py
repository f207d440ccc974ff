"""Quantize a model in memory, or while transformers loads it.

Both write the packed checkpoint to a temporary directory, below `TMPDIR`, and load that: so every method is
there, and the result is that of `quantkit.quantize` bit by bit.
"""

import copy
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantkit.errors import OutputError, UsageError
from quantkit.files import os_error_text
from quantkit.model.distributed import Ranks
from quantkit.planning import plan_checkpoint
from quantkit.progress import Progress
from quantkit.progress_bar import reporting
from quantkit.quantization.blockwise.block_tasks import needs_data
from quantkit.quantization.keywords import QuantizeKeywords, options_of, with_keywords
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize_checkpoint
from quantkit.runtime.load import load
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.transformers.patches.quantizers import NAME

if TYPE_CHECKING:
    from quantkit.runtime.load import LoadedModel


@with_keywords
def quantize_model(
    model: Any,
    *,
    tokenizer: Any = None,
    progress: Progress | bool | None = None,
    **given: Unpack[QuantizeKeywords],
) -> "LoadedModel":
    """Return `model`, a dense model of transformers, quantized: packed, on its device and in its dtype.

    The options are those of `quantize`. `tokenizer` is needed for calibration texts alone. `model` is left as
    it is. Its weights are written once as they are and once packed, to a temporary directory.
    `save_pretrained` of the result writes a directory that `load` and `from_pretrained` read.

    Raises `UsageError` for a model that is packed, has adapters or is divided among devices, and
    `QuantkitError` for every other refusal.
    """
    options = options_of(given, "quantize_model")
    _check_dense(model)
    with _work_directory() as work, reporting(progress, "quantizing") as report:
        dense, packed = work / "dense", work / "packed"
        try:
            model.save_pretrained(dense)
            if tokenizer is not None:
                tokenizer.save_pretrained(dense)
        except OSError as error:
            raise OutputError(
                f"the model cannot be written to {dense}: {os_error_text(error)}. Set TMPDIR to a directory "
                "with room for it."
            ) from error
        if tokenizer is None and (
            options.budget is not None or needs_data(plan_checkpoint(dense, options)[1])
        ):
            raise UsageError(
                "calibration texts take the model's tokenizer: give it as tokenizer=, or choose a method "
                "without data, such as mse, and a format."
            )
        quantize_checkpoint(dense, packed, options, progress=report, ranks=Ranks())
        shutil.rmtree(dense)
        found = load(packed, device=model.device, dtype=model.dtype)
    found.config._name_or_path = getattr(model.config, "_name_or_path", "")
    return found


def _check_dense(model: Any) -> None:
    if not hasattr(model, "save_pretrained") or not hasattr(model, "named_modules"):
        raise UsageError(
            f"quantize_model takes a model of transformers, not a {type(model).__name__}. Pack a single "
            "weight with quantkit.quantize_tensor."
        )
    if (name := next((name for name, _ in packed_modules(model)), None)) is not None:
        raise UsageError(f"{name!r} is packed already. Quantize the original model.")
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise UsageError("the model has adapters. Merge or unload them first, with PEFT.")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UsageError(
            "the model is divided among devices or offloaded. Quantize its directory with quantkit.quantize."
        )


@contextmanager
def _work_directory() -> Iterator[Path]:
    # Files that a model maps stay readable when they are removed.
    with tempfile.TemporaryDirectory(prefix="quantkit-") as work:
        yield Path(work)


@contextmanager
def _defaults() -> Iterator[None]:
    """Context manager: restore torch's default device and dtype, which transformers changes while loading."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


class QuantkitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantizes a dense checkpoint while transformers loads it.

        AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=QuantkitConfig(format="int4"))

    The options are those of `quantize`. The packed checkpoint is written to a temporary directory, which is
    removed with the model, and loaded from there: the dense weights are never in memory. A directory that is
    packed already is loaded as it is.
    """

    def __init__(self, *, progress: Progress | bool | None = None, **given: Unpack[QuantizeKeywords]) -> None:
        self.quant_method = NAME
        self.given = given
        self.progress = progress
        self.options: QuantizeOptions = options_of(given, "QuantkitConfig")

    def pack(self, directory: Path, model: Any) -> Path:
        """Quantize `directory` to a temporary directory, deleted with `model`, and return its path."""
        work = Path(tempfile.mkdtemp(prefix="quantkit-"))
        weakref.finalize(model, shutil.rmtree, work, ignore_errors=True)
        with _defaults(), reporting(self.progress, "quantizing") as report:
            # Each process of torchrun packs for itself.
            alone = Ranks()
            done = quantize_checkpoint(directory, work / "packed", self.options, progress=report, ranks=alone)
            return done.directory

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values; others as text."""
        plain = (str, int, float, bool, list, type(None))
        values = {name: one if isinstance(one, plain) else str(one) for name, one in self.given.items()}
        return {"quant_method": self.quant_method, **copy.deepcopy(values)}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return `to_dict`, which has only the options of the call."""
        return self.to_dict()

    def __repr__(self) -> str:
        return f"QuantkitConfig({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


with_keywords(QuantkitConfig.__init__)
