"""When two ranks' operations at one slot agree, and what an operation promises. Facts: `operations.toml`."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from wattwatch.watcher.diagnosis.flight_recorder.model import Operation


@dataclass(frozen=True, slots=True)
class OperationRule:
    synchronising: bool = False
    inputs: bool = False  # elements must agree
    outputs: bool = False
    own_sizes: bool = False  # sizes differ from rank to rank, rightly or not


@lru_cache(maxsize=1)
def operation_rules() -> dict[str, OperationRule]:
    text = resources.files(__package__).joinpath("operations.toml").read_text("utf-8")
    return {name: OperationRule(**rule) for name, rule in tomllib.loads(text).items()}


def synchronising(operation: Operation) -> bool:
    """Whether nobody can finish it before every member came."""
    return operation_rules().get(operation.name, OperationRule()).synchronising


def has_per_rank_sizes(operation: Operation) -> bool:
    """Whether each rank has sizes of its own, so that they prove nothing and may still be what is wrong."""
    return operation_rules().get(operation.name, OperationRule()).own_sizes


def same_kind(one: Operation, other: Operation) -> bool:
    return one.name == other.name


def operation_signature(operation: Operation) -> tuple[object, ...]:
    """What all members must have in common: operations with equal signatures agree."""
    rule = operation_rules().get(operation.name, OperationRule())
    return (
        operation.name,
        _elements(operation.input_sizes) if rule.inputs else None,
        _elements(operation.output_sizes) if rule.outputs else None,
        operation.input_types if rule.inputs or rule.outputs else None,
    )


def _elements(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(size) for size in sizes)


def describe_operation(operation: Operation, sizes: bool = False) -> str:
    """ "all_reduce", with `sizes` "all_reduce of [1025] Float"."""
    if operation.point_to_point:
        return f"{operation.name} {operation.source}->{operation.destination}"
    if not sizes or not operation.input_sizes:
        return operation.name
    shapes = ", ".join(str(list(size)) for size in operation.input_sizes[:3])
    more = "" if len(operation.input_sizes) <= 3 else f" and {len(operation.input_sizes) - 3} more"
    return f"{operation.name} of {shapes}{more} {'/'.join(sorted(set(operation.input_types)))}".rstrip()
