"""Budgets of an allocation, and the price of linears: in bytes, or in measured decoding time."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.kernels.problem import gpu_of
from quantkit.kernels.registry import KERNELS
from quantkit.kernels.tuning.store import named_tables, table_name
from quantkit.kernels.tuning.tile_table import time_of
from quantkit.model.architectures import EXPERTS_PER_TOKEN, experts_per_token
from quantkit.model.experts import GATE_UP
from quantkit.model.structure import Linear
from quantkit.packing.schemes import Scheme

#: Price of a linear in a scheme, in whole numbers of the unit that a limit counts; None if unknown.
Price = Callable[[Linear, Scheme], int | None]


@dataclass(frozen=True)
class Limit(ABC):
    """Largest total cost of all linears in an allocation: `amount`, in the `unit` of the subclass."""

    amount: float

    #: Option of the command line, without dashes.
    key: ClassVar[str]
    #: Unit of prices, which are whole numbers.
    counts: ClassVar[str]
    example: ClassVar[str]
    #: How a user can make unknown prices known.
    remedy: ClassVar[str] = ""
    #: Menus of `candidates.MENUS`: by default a budget chooses from the first that reaches it.
    menus: ClassVar[tuple[str, ...]] = ("all",)

    def __post_init__(self) -> None:
        if not 0 < self.amount < math.inf:
            raise UsageError(f"{self.amount} {self.unit} are no budget; use a number such as {self.example}.")

    @property
    @abstractmethod
    def unit(self) -> str:
        """Return the unit of `amount`, in words."""

    @property
    def option(self) -> str:
        """Return the option of the command line."""
        return f"--{self.key.replace('_', '-')}"

    @abstractmethod
    def in_one(self, weights: int) -> float:
        """Return the number of `counts`, such as bytes, per `unit`, for a model of `weights` weights."""

    @abstractmethod
    def price(self, checkpoint: Checkpoint) -> Price:
        """Return the function that prices linears of a checkpoint.

        Raises `UsageError` if no times were measured.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; `from_dict` is the inverse."""
        return {self.key: self.amount}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Limit":
        """Parse the output of `to_dict`; raise `KeyError` or `TypeError` for anything else."""
        if MillisecondsPerToken.key in data:
            return MillisecondsPerToken(data[MillisecondsPerToken.key], data["gpu"])
        return BitsPerWeight(data[BitsPerWeight.key])


@dataclass(frozen=True)
class BitsPerWeight(Limit):
    """Limit on stored bits per weight, with all parts of the linears."""

    key: ClassVar[str] = "bits_per_weight"
    counts: ClassVar[str] = "bytes"
    example: ClassVar[str] = "4.5"
    #: A budget of bits says nothing of speed, nor of who reads the result; formats that have both come first.
    menus: ClassVar[tuple[str, ...]] = ("engine", "fast")
    unit = "bits per weight"

    def in_one(self, weights: int) -> float:
        return weights / 8

    def price(self, checkpoint: Checkpoint) -> Price:
        return stored_bytes


@dataclass(frozen=True)
class MillisecondsPerToken(Limit):
    """Limit on milliseconds per token: the sum of the measured GEMM times of all linears for one token.

    Times come from the tile tables of `gpu`, a name such as `NVIDIA H200` or `nvidia_h200`.
    """

    gpu: str

    key: ClassVar[str] = "milliseconds_per_token"
    counts: ClassVar[str] = "nanoseconds"
    example: ClassVar[str] = "2.5"
    remedy: ClassVar[str] = (
        "On that GPU `quantkit tune` measures them: for a packed checkpoint that has them or, with scales of "
        "the format's own dtype, by --shapes and --formats."
    )

    @property
    def unit(self) -> str:
        return f"milliseconds per token on {self.gpu}"

    @classmethod
    def here(cls, amount: float) -> "MillisecondsPerToken":
        """Return the limit for the GPU of this machine; raise `UsageError` without one."""
        gpu = gpu_of(torch.device("cuda"))
        if gpu is None:
            raise UsageError(
                "there is no GPU here to decode on. Name the one that --milliseconds-per-token is for with "
                "--gpu, such as --gpu nvidia_h200."
            )
        return cls(amount, table_name(gpu.name))

    def in_one(self, weights: int) -> float:
        return 1e6

    def price(self, checkpoint: Checkpoint) -> Price:
        tables = [stored.table for stored in named_tables(self.gpu, KERNELS)]

        def price(linear: Linear, scheme: Scheme) -> int | None:
            # Times of tables are those of products with inputs as they are.
            if scheme.activations is not None:
                return None
            # Activation dtype on a GPU: models of other dtypes are loaded as bfloat16.
            stored = checkpoint.tensors[f"{linear.stored[0]}.weight"].torch_dtype
            dtype = torch.float16 if stored == torch.float16 else torch.bfloat16
            us = time_of(tables, scheme, *linear.shape, dtype)
            return None if us is None else round(1e3 * us) * launches(checkpoint, linear)

        return price

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "gpu": self.gpu}


@dataclass(frozen=True)
class Budget:
    """Limit, and the formats or menus to choose from; None for the menus of the limit."""

    limit: Limit
    formats: tuple[str, ...] | None = None

    @property
    def asked(self) -> tuple[tuple[str, ...], ...]:
        """Return the formats or menus to choose from: the first that reach the limit, of one or more."""
        return tuple((menu,) for menu in self.limit.menus) if self.formats is None else (self.formats,)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**self.limit.to_dict(), "formats": None if self.formats is None else list(self.formats)}


def stored_bytes(linear: Linear, scheme: Scheme) -> int:
    """Return the bytes of a linear in a scheme, with all parts of all its matrices.

    This is an upper bound for all containers.
    """
    parts = scheme.storage_shapes(linear.shape).values()
    return len(linear.stored) * sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts)


def launches(checkpoint: Checkpoint, linear: Linear) -> int:
    """Return the number of GEMMs that one token launches for a linear.

    This is 1 for a linear. For experts, it is the number of experts per token, twice that for gate and up.
    """
    if linear.kind != "experts":
        return 1
    chosen = experts_per_token(checkpoint.config)
    if chosen is None:
        name = EXPERTS_PER_TOKEN[0]
        raise UsageError(
            f"{checkpoint.directory / 'config.json'}: {name!r} is {checkpoint.config.get(name)!r}; how many "
            f"experts a token chooses says what they take. Decide on them with a rule, such as --rule "
            f"'{linear.module.rpartition('.')[0]}.*=int4'."
        )
    return chosen * (2 if linear.module.endswith(f".{GATE_UP}") else 1)
