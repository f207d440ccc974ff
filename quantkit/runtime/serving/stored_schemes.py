"""Scheme of each layer of an engine, from the config of a checkpoint and the names of its tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from quantkit.checkpoint.engines import FUSED, Engine, reordered
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.errors import UsageError
from quantkit.packing.schemes import Scheme

#: Modules of the checkpoint, and the scheme of each.
Schemes = Sequence[tuple[str, Scheme | None]]
#: End of the name of a tensor that every packed matrix has.
_SCALE = ".weight_scale"
#: Tensor that plug-ins do not load by rows.
_SHAPE = "weight_shape"
#: Names of gate, up and down of an expert, which a layer may leave to the loader of its model.
_OF_EXPERTS = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))


class StoredSchemes:
    """Schemes of the modules of a checkpoint, by the names that an engine has for its layers.

    `tensors` are the names of those in the files: an engine asks for routers too, which are no linears to
    transformers. `architecture` has the entries of config.json, which is in `directory`.
    """

    def __init__(
        self,
        config: QuantizationConfig,
        tensors: Iterable[str] = (),
        architecture: Mapping[str, Any] | None = None,
        directory: Path = Path(),
    ) -> None:
        #: With names of transformers, and with those of the engine.
        self._own = self._config = config
        self.container = config.container
        self._keep_names(tensors)
        self._architecture, self._directory = architecture or {}, directory
        #: Modules, or owners of experts, of which the engine made a layer, if it says so.
        self.asked: set[str] = set()

    def rename(self, mapper: Any) -> None:
        """Rename the modules as the engine does, by its `mapper`."""
        modules = mapper.apply_dict(dict(self._config.modules))
        self._config = QuantizationConfig(self._config.container, self._config.default, modules)
        self._keep_names(mapper.apply_list(sorted(self._tensors)))

    def _keep_names(self, tensors: Iterable[str]) -> None:
        """Keep the names of tensors, and for each module that has some the names below it."""
        self._tensors = frozenset(tensors)
        self._below: dict[str, set[str]] = {}
        for tensor in self._tensors:
            for name in _with_owners(tensor):
                above, _, called = name.rpartition(".")
                self._below.setdefault(above, set()).add(called)

    @property
    def packed(self) -> frozenset[str]:
        """Return the packed matrices in the files, those of experts one by one."""
        scales = (name for name in self._tensors if name.endswith(_SCALE))
        return frozenset(name.removesuffix(_SCALE) for name in scales)

    def linears(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> Schemes:
        """Return the linears that the engine's layer `prefix` is made of, and the scheme of each.

        `fused` has the names of the linears in a layer, by its name.
        """
        owner, _, leaf = prefix.rpartition(".")
        # A class may fuse what the file holds apart or as one matrix, and list the parts or not.
        found = [
            [(name, self._scheme_of(name)) for name in (f"{owner}.{one}".lstrip(".") for one in parts)]
            for parts in (fused.get(leaf, (leaf,)), (leaf,), FUSED.get(leaf, ()))
        ]
        packed = (one for one in found if any(scheme for _, scheme in one))
        return next(packed, None) or self._beside(prefix, fused) or found[0]

    def _beside(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> Schemes | None:
        """Return the linears of `prefix` under the name of its owner in the files, None if there are none.

        A class may call a module otherwise than it stores it: Jamba's `0.mixer.in_proj` is `0.mamba.in_proj`.
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
        """Return the scheme of a linear: that of most is not named, and the files say which are packed."""
        is_packed = name in self._config.modules or name + _SCALE in self._tensors
        return self._config.scheme_of(name) if is_packed else None

    def table(self, prefix: str, shape: tuple[int, int]) -> tuple[str, Scheme | None]:
        """Return the embedding called `prefix`, and its scheme.

        One without a name is the input embedding if it has the `shape` [V, K] of that.
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
        """Return the parameter of the model, and its scheme, in which each of `matrices` is.

        They are names of matrices of an expert in the file, below those of the engine's layer `prefix`. If
        there are none, as the layer leaves them to the loader of its model, usual names are looked for.
        """
        from quantkit.model.names import renamed

        known = (*filter(None, [matrices]), *_OF_EXPERTS)
        matrices = next((of for of in known if f"{prefix}.0.{of[0]}{_SCALE}" in self._tensors), ())
        if not matrices:
            return [(prefix, None)]
        stored = [f"{prefix}.0.{matrix}.weight" for matrix in matrices]
        names = [place.parameter for _, place in renamed(self._meta_model(), stored)]
        return [(name, self._own.scheme_of(name)) for name in names]

    def check_all_asked(self, engine: str, absent: Set[str] | None = None) -> None:
        """Raise `UsageError` if the engine has no layer for a packed matrix.

        With `absent`, matrices below those modules are not checked, nor numbered blocks of which the engine
        has made no layer. They are on another rank, or predict further tokens.
        """
        missing = sorted(name for name in self.packed if self.asked.isdisjoint(_with_owners(name)))
        if absent is not None:
            blocks = {_block(name) for name in self.asked} | {None}
            missing = [
                name for name in missing if _block(name) in blocks and absent.isdisjoint(_with_owners(name))
            ]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UsageError(
                f"{missing[0]!r}{more}: packed in the checkpoint, but {engine}'s class of this model asks no "
                "plug-in for it on this rank. Quantize the model with that one dense, use fewer ranks, or "
                "load it with quantkit.load."
            )

    def check_rows(self, engine: Engine) -> None:
        """Raise `UsageError` for a matrix of which the engine reorders the rows of some tensors alone."""
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
    """Yield a module and those that have it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _block(name: str) -> str | None:
    """Return the first numbered module that has the module `name`, None without one."""
    found = re.match(r"(.+?\.\d+)\.", name)
    return found[1] if found else None
