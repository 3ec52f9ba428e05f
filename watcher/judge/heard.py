"""What is kept of one node between looks: its boards as they were ever shown, and how often they were read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from collectors.samples import GpuSample, KernelEvent, NodeSample
from watcher.judge.boards import short_pci

# Boards asked within this long of each other were asked once: a slow query's answer stands in several lines.
SAME_READING_SECONDS: Final = 0.05


@dataclass(slots=True)
class Heard:
    """What is kept of one node between looks."""

    sample: NodeSample | None = None
    boards: dict[str, GpuSample] = field(default_factory=dict)  # by key: the most it has ever shown
    used: set[str] = field(default_factory=set)  # keys of those that ever held somebody's memory
    kernel_events: list[KernelEvent] = field(default_factory=list)  # since the last look
    reading: int = 0  # how often its boards were read
    read_seconds: float | None = None  # when, on the node's clock

    def places(self) -> dict[str, int]:
        """Key -> place of each board among the node's, by the driver's index. Those that nobody ever used beside others
        that are in use are not the job's (CUDA_VISIBLE_DEVICES), and ranks are counted without them."""
        idle = [
            gpu.index
            for key, gpu in (self.boards.items() if 0 < len(self.used) < len(self.boards) else ())
            if gpu.index is not None and gpu.memory_used_bytes is not None and key not in self.used
        ]
        return {
            key: gpu.index - sum(other < gpu.index for other in idle)
            for key, gpu in self.boards.items()
            if gpu.index is not None and gpu.index not in idle
        }

    def count_reading(self, sample: NodeSample) -> None:
        """Tell a new reading of the boards from an old answer that is repeated."""
        if sample.gpus is None or (self.sample is not None and sample.sequence == self.sample.sequence):
            return
        read = sample.node_seconds - sample.gpus_age_seconds
        repeated = sample.gpus_age_seconds > 0 and self.read_seconds is not None
        if not repeated or abs(read - (self.read_seconds or 0.0)) > SAME_READING_SECONDS:
            self.reading += 1
        self.read_seconds = read


def in_no_other_name(known: Mapping[str, GpuSample], now: Mapping[str, GpuSample]) -> dict[str, GpuSample]:
    """Those known before, without the ones that another board sits in the place of: it was exchanged, or another tool
    calls it by another name. That is no loss."""
    new = [gpu for key, gpu in now.items() if key not in known]
    slots = {short_pci(gpu.pci_bus_id) for gpu in new if gpu.pci_bus_id is not None}
    indexes = {gpu.index for gpu in new} - {None}
    slotless = {gpu.index for gpu in new if gpu.pci_bus_id is None} - {None}

    def taken(gpu: GpuSample) -> bool:
        # The slot tells; where one of the two names none, the driver's index does.
        if gpu.pci_bus_id is None:
            return gpu.index in indexes
        return short_pci(gpu.pci_bus_id) in slots or gpu.index in slotless

    return {key: gpu for key, gpu in known.items() if key in now or not taken(gpu)}
