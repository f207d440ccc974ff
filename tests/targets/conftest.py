"""Packed directories to export."""

from collections.abc import Callable
from pathlib import Path

import pytest

import quantkit

from ..checkpoint.gguf_files import tiny_model

Pack = Callable[..., Path]


@pytest.fixture(autouse=True)
def small_products(one_thread: None) -> None:
    """Also where no command runs."""


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny random model of an architecture of llama.cpp, as transformers saves it."""
    made: dict[object, Path] = {}

    def source(arch: str, **options: object) -> Path:
        key = arch, str(sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(arch) / "source"
            model = tiny_model(arch, **options)
            model.save_pretrained(made[key])
        return made[key]

    return source


@pytest.fixture
def pack(sources: Callable[..., Path], tmp_path: Path) -> Pack:
    """`quantize` of such a model, by options of its own."""

    def packed(arch: str = "llama", model: dict[str, object] | None = None, **options: object) -> Path:
        out = tmp_path / f"packed{len(list(tmp_path.iterdir()))}"
        given = {"group_size": 32, "scale_dtype": "float16", "method": "rtn", "check": False, **options}
        quantkit.quantize(sources(arch, **(model or {})), out, **given)  # type: ignore[arg-type]
        return out

    return packed
