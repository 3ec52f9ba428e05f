"""When the operations of two ranks at one slot agree, and what an operation guarantees. Facts: `operations.toml`."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from wattwatch.watcher.diagnosis.flight_recorder.model import Operation


@dataclass(frozen=True, slots=True)
class OperationRule:
    """One row of operations.toml. The defaults hold for operations that are not listed there."""

    synchronizing: bool = False
    inputs: bool = False
    outputs: bool = False
    per_rank_sizes: bool = False


@lru_cache(maxsize=1)
def operation_rules() -> dict[str, OperationRule]:
    """operations.toml, by name of the operation."""
    text = resources.files(__package__).joinpath("operations.toml").read_text("utf-8")
    return {name: OperationRule(**rule) for name, rule in tomllib.loads(text).items()}


def is_synchronizing(operation: Operation) -> bool:
    """Whether no member can finish it before every member has launched it."""
    return operation_rules().get(operation.name, OperationRule()).synchronizing


def has_per_rank_sizes(operation: Operation) -> bool:
    """Whether sizes differ between ranks even in a correct program, so that a difference proves nothing."""
    return operation_rules().get(operation.name, OperationRule()).per_rank_sizes


def operation_signature(operation: Operation) -> tuple[object, ...]:
    """What all members must have in common: operations agree if their signatures are equal."""
    rule = operation_rules().get(operation.name, OperationRule())
    return (
        operation.name,
        _element_count(operation.input_sizes) if rule.inputs else None,
        _element_count(operation.output_sizes) if rule.outputs else None,
        operation.input_types if rule.inputs or rule.outputs else None,
    )


def _element_count(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(size) for size in sizes)


def describe_operation(operation: Operation, sizes: bool = False) -> str:
    """`all_reduce`, with `sizes` `all_reduce of [1025] Float`; `send 0->1` for a send."""
    if operation.point_to_point:
        return f"{operation.name} {operation.source}->{operation.destination}"
    if not sizes or not operation.input_sizes:
        return operation.name
    shapes = ", ".join(str(list(size)) for size in operation.input_sizes[:3])
    more = "" if len(operation.input_sizes) <= 3 else f" and {len(operation.input_sizes) - 3} more"
    return f"{operation.name} of {shapes}{more} {'/'.join(sorted(set(operation.input_types)))}".rstrip()
