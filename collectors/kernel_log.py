"""A line of the kernel log -> `KernelEvent`, where it names a fault: Xid, out of memory, segmentation fault.

Sources: NVIDIA's Xid messages ("NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, ..."; pid and name
since driver 510, "pid='<unknown>'" too); Linux mm/oom_kill.c; arch/x86/mm/fault.c. Which Xid means what is judged
elsewhere.
"""

from __future__ import annotations

import re
from typing import Final

from collectors.samples import KernelEvent

XID: Final = re.compile(
    r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d+)"
    r"(?:, pid='?(?P<pid>\d+|<unknown>)'?)?(?:, name='?(?P<process>[^,']*)'?)?"
)
OOM_KILLED: Final = re.compile(r"(?:Killed|Kill) process (?P<pid>\d+)(?:,)? \((?P<process>[^)]*)\)")
OOM_CHOICE: Final = re.compile(r"oom-kill:.*\btask=(?P<process>[^,]+),pid=(?P<pid>\d+)")
SEGFAULT: Final = re.compile(r"(?P<process>[^\s\[\]]+)\[(?P<pid>\d+)\]:? (?:segfault at|general protection fault)")


def read_kernel_line(text: str, age_seconds: float | None = None) -> KernelEvent | None:
    """The fault that this line names; None for any other line."""
    found = XID.search(text)
    if found is not None:
        pid = found["pid"]
        return KernelEvent(
            "xid",
            text,
            age_seconds,
            xid=int(found["xid"]),
            pci_bus_id=full_bus_id(found["bus"]),
            pid=int(pid) if pid is not None and pid.isdigit() else None,
            process=found["process"] or None,
        )
    for kind, pattern in (("oom", OOM_KILLED), ("oom", OOM_CHOICE), ("segfault", SEGFAULT)):
        found = pattern.search(text)
        if found is not None:
            return KernelEvent(kind, text, age_seconds, pid=int(found["pid"]), process=found["process"])
    return None


def full_bus_id(bus: str) -> str:
    """ "0000:9b:00" -> "00000000:9B:00.0", as nvidia-smi and NVML print it, so that the two can be compared."""
    parts = bus.split(":")
    if len(parts) != 3:
        return bus
    domain, number, device = parts
    return f"{domain.zfill(8)}:{number}:{device if '.' in device else device + '.0'}".upper()
