"""Find the scheme of each layer of an engine, from config.json and the tensor names of a checkpoint."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from quantkit.checkpoint.engines import FUSED, Engine, reordered
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.errors import UsageError, first_of
from quantkit.packing.schemes import Scheme

#: Names of modules in the checkpoint, with their schemes; None for a dense module.
Schemes = Sequence[tuple[str, Scheme | None]]
#: End of the name of a tensor that every packed matrix has.
_SCALE = ".weight_scale"
#: Tensor that plug-ins do not load by rows.
_SHAPE = "weight_shape"
#: Names of gate, up and down of an expert that are tried if the engine's layer does not know them.
_OF_EXPERTS = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))


class StoredSchemes:
    """Schemes of the modules of a checkpoint, by the engine's names of layers.

    `tensors` are the names of stored tensors, which tell which layers are packed: the default scheme of
    `config` is not for routers. `architecture` is config.json in `directory`.
    """

    def __init__(
        self,
        config: QuantizationConfig,
        tensors: Iterable[str] = (),
        architecture: Mapping[str, Any] | None = None,
        directory: Path = Path(),
    ) -> None:
        #: The config with names of transformers, and with those of the engine once `rename` is called.
        self._own = self._config = config
        self.container = config.container
        self._keep_names(tensors)
        self._architecture, self._directory = architecture or {}, directory
        #: Modules for whose layers the engine asked for a quantization method; of experts, the parent.
        self.asked: set[str] = set()

    def rename(self, mapper: Any) -> None:
        """Rename the modules as the engine does, by the engine's `mapper`."""
        modules = mapper.apply_dict(dict(self._config.modules))
        self._config = QuantizationConfig(self._config.container, self._config.default, modules)
        self._keep_names(mapper.apply_list(sorted(self._tensors)))

    def _keep_names(self, tensors: Iterable[str]) -> None:
        """Store the names `tensors`, and for each module the names of its children and own tensors."""
        self._tensors = frozenset(tensors)
        self._below: dict[str, set[str]] = {}
        for tensor in self._tensors:
            for name in _with_owners(tensor):
                above, _, called = name.rpartition(".")
                self._below.setdefault(above, set()).add(called)

    @property
    def packed(self) -> frozenset[str]:
        """Return the names of packed matrices in the files, with one name per matrix of an expert."""
        scales = (name for name in self._tensors if name.endswith(_SCALE))
        return frozenset(name.removesuffix(_SCALE) for name in scales)

    def linears(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> Schemes:
        """Return the linears that the engine fuses into layer `prefix`: (name, scheme or None) of each.

        `fused` maps the name of a fused layer to the names of its linears.
        """
        owner, _, leaf = prefix.rpartition(".")
        # A class may fuse what the file holds apart or as one matrix, and list the parts or not.
        found = [
            [(name, self._scheme_of(name)) for name in (f"{owner}.{one}".lstrip(".") for one in parts)]
            for parts in (fused.get(leaf, (leaf,)), (leaf,), FUSED.get(leaf, ()))
        ]
        packed = (one for one in found if any(scheme for _, scheme in one))
        return next(packed, None) or self._under_other_parent(prefix, fused) or found[0]

    def _under_other_parent(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> Schemes | None:
        """Return the schemes of the linears of module `prefix` if the checkpoint renames its parent.

        Jamba: the engine's `0.mixer.in_proj` is stored as `0.mamba.in_proj`. Returns None if the checkpoint
        stores no such linears. `fused` maps the name of a fused layer to the names of its linears.
        """
        owner, _, leaf = prefix.rpartition(".")
        above, _, called = owner.rpartition(".")
        beside = self._below.get(above, set())
        if not above or called in beside:
            return None
        found = [self.linears(f"{above}.{one}.{leaf}", fused) for one in sorted(beside)]
        packed = [one for one in found if any(scheme for _, scheme in one)]
        return packed[0] if len(packed) == 1 else None

    def _scheme_of(self, name: str) -> Scheme | None:
        """Return the scheme of a linear; None unless the config names the linear or the files pack it."""
        is_packed = name in self._config.modules or name + _SCALE in self._tensors
        return self._config.scheme_of(name) if is_packed else None

    def table(self, prefix: str, shape: tuple[int, int]) -> tuple[str, Scheme | None]:
        """Return (name, scheme) of the embedding layer `prefix`; scheme None if it is dense.

        A layer with an empty `prefix` is the input embedding if its `shape` [V, K] is that of the embedding.
        """
        if prefix or not any(self._own.modules.values()):
            return prefix, self._config.modules.get(prefix)
        model: Any = self._meta_model()
        table = model.get_input_embeddings()
        if tuple(table.weight.shape) != shape:
            return prefix, None
        name = next((name for name, module in model.named_modules() if module is table), "")
        return name, self._own.modules.get(name)

    def experts(self, prefix: str, matrices: Sequence[str]) -> Schemes:
        """Return a (parameter name, scheme) pair per matrix of the experts in layer `prefix`.

        A name is such as "model.layers.0.mlp.experts.down_proj". Experts that are not quantized give
        [(prefix, None)]. `matrices` are the names of an expert's matrices in the files, such as ("gate_proj",
        "up_proj", "down_proj"). If it is empty, the names in `_OF_EXPERTS` are tried.
        """
        from quantkit.model.names import renamed

        candidates = (*filter(None, [matrices]), *_OF_EXPERTS)
        matrices = next((of for of in candidates if f"{prefix}.0.{of[0]}{_SCALE}" in self._tensors), ())
        if not matrices:
            return [(prefix, None)]
        stored = [f"{prefix}.0.{matrix}.weight" for matrix in matrices]
        names = [place.parameter for _, place in renamed(self._meta_model(), stored)]
        return [(name, self._own.scheme_of(name)) for name in names]

    def check_all_asked(self, engine: str, absent: Set[str] | None = None) -> None:
        """Raise `UsageError`, which names `engine`, if the engine has no layer for a packed matrix.

        If `absent` is given, the modules in it are not checked, as they are on another rank. Nor are numbered
        blocks of which the engine has no layer: they are on another rank or predict further tokens.
        """
        missing = sorted(name for name in self.packed if self.asked.isdisjoint(_with_owners(name)))
        if absent is not None:
            blocks = {_block(name) for name in self.asked} | {None}
            missing = [
                name for name in missing if _block(name) in blocks and absent.isdisjoint(_with_owners(name))
            ]
        if missing:
            raise UsageError(
                f"{first_of(map(repr, missing))}: packed in the checkpoint, but {engine}'s class of this "
                "model asks no plug-in for it on this rank. Quantize the model with that one dense, use "
                "fewer ranks, or load it with quantkit.load."
            )

    def check_rows(self, engine: Engine) -> None:
        """Raise `UsageError` for a matrix if the engine reorders the rows of only some of its tensors."""
        for row in reordered(self._architecture):
            for name in sorted(self.packed) if row.engine == engine else ():
                scheme, start = self._config.scheme_of(name), f"{name}.weight"
                tensors = {one[len(name) + 1 :] for one in self._tensors if one.startswith(start)}
                unfit = row.unfit(
                    name, tensors - {_SHAPE}, per_tensor=scheme is not None and scheme.per_tensor
                )
                if unfit is not None:
                    raise UsageError(
                        f"{name!r} is {scheme}: {engine.name} reorders its rows as it loads, and its {unfit} "
                        f"{'has none' if row.stops else 'stays as it is'}. Quantize the model with "
                        f"{' and '.join(row.linears)} dense, or in int4 without zero-points, or load it with "
                        "quantkit.load."
                    )

    def _meta_model(self) -> Any:
        from quantkit.model.model_class import meta_model

        return meta_model(self._architecture, self._directory)


def _with_owners(name: str) -> Iterator[str]:
    """Yield the name of a module, and of each module that contains it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _block(name: str) -> str | None:
    """Return the outermost numbered module around `name`, such as "model.layers.3"; None if there is none."""
    found = re.match(r"(.+?\.\d+)\.", name)
    return found[1] if found else None
