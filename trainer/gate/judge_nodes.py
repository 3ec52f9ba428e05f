"""World and devices: are all ranks there, alike, with sound boards of their own?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from trainer.gate.report import Gpu, NodeReport
from trainer.gate.saying import differing, fail, some, warn
from trainer.gate.verdict import Check, Level, Problem
from trainer.ranks import ranks_in_words

MAX_SKEW_SECONDS: Final = 1.0
MAX_USED_MEMORY_SHARE: Final = 0.05
MAX_IDLE_CELSIUS: Final = 60.0  # idle boards are at 25 to 45; one that has just lost a job cools within seconds
MAX_IDLE_POWER_SHARE: Final = 0.3  # of the limit; idle ones draw 0.1 to 0.2
NODES_OWN: Final = ("_IFNAME", "_HCA", "NCCL_HOSTID", "NCCL_TOPO_FILE")  # names of a node's own wires may differ


def judge_world(reports: Sequence[NodeReport], note: str) -> Check:
    """Every rank once, and nodes that agree on settings, code, versions and environment."""
    settings = reports[0].settings
    seen = Counter(rank for report in reports for rank in report.ranks)
    problems = []
    if missing := [rank for rank in range(settings.world) if rank not in seen]:
        problems.append(fail(f"{ranks_in_words(missing)} never came{': ' + note if note else ''}"))
    for rank in sorted(rank for rank, times in seen.items() if times > 1):
        nodes = [report.node for report in reports if rank in report.ranks]
        problems.append(fail(f"rank {rank} came {len(nodes)} times, from {some(nodes)}"))
    if outside := sorted(rank for rank in seen if rank >= settings.world):
        problems.append(fail(f"{ranks_in_words(outside)} came, and the world is {settings.world}"))
    for report in reports:
        problems += [fail(f"{report.node}: {trouble}") for trouble in report.troubles]
    for setting in type(settings).__dataclass_fields__:
        problems += differing(f"setting {setting}", [(r.node, getattr(r.settings, setting)) for r in reports])
    problems += differing("the trainer's code", [(r.node, r.code_sha256) for r in reports if r.code_sha256])
    configs = [(r.node, (r.model and r.model.config_sha256) or "none named") for r in reports]
    problems += differing("the configuration file", configs)
    for library in sorted({name for report in reports for name in report.versions}):
        found = [(r.node, r.versions.get(library, "not said")) for r in reports if r.versions]
        problems += differing(library, found)
    for name in sorted({name for report in reports for name in report.environment}):
        level = Level.WARN if name.endswith(NODES_OWN) else Level.FAIL
        problems += differing(name, [(r.node, r.environment.get(name, "not set")) for r in reports], level)
    for report in reports:
        if report.skew_seconds is not None and abs(report.skew_seconds) > MAX_SKEW_SECONDS:
            problems.append(warn(f"{report.node}: its clock is {report.skew_seconds:+.1f} s off rank 0's node"))
    summary = f"ranks={len(seen)}/{settings.world} nodes={len({report.node for report in reports})}"
    return Check("world", tuple(problems), summary)


def judge_devices(reports: Sequence[NodeReport]) -> Check:
    """The same boards on every node, enough of them, and nobody else on them."""
    problems = []
    looks = [(report, report.devices) for report in reports if report.devices is not None]
    problems += [fail(f"{report.node}: the GPUs were not looked at") for report in reports if report.devices is None]
    for report, look in looks:
        if look.trouble:
            problems.append(fail(f"{report.node}: {look.trouble}"))
        problems += [fail(f"{report.node}: somebody computes there: {process}") for process in look.processes]
        busy = {process.rpartition(" ")[2] for process in look.processes}
        problems += [
            warn(f"{report.node}: GPU {gpu.index} has {gpu.memory_used_mib:,.0f} MiB in use by nobody that is seen")
            for gpu in look.gpus
            if gpu.memory_used_mib > MAX_USED_MEMORY_SHARE * gpu.memory_total_mib and str(gpu.index) not in busy
        ]
        problems += [
            warn(f"{report.node}: GPU {gpu.index} {text}")
            for gpu in look.gpus
            for text in _illness(gpu, str(gpu.index) in busy)
        ]
    skipped = [report.node for report, look in looks if look.skipped]
    seen = [(report, look) for report, look in looks if not look.skipped and not look.trouble]
    if skipped and seen:
        problems.append(fail(f"no nvidia-smi on {some(skipped)}, and GPUs on {some([r.node for r, _ in seen])}"))
    by_node = Counter(rank_node for report in reports for rank_node in [report.node] * len(report.ranks))
    for report, look in seen:
        if len(look.gpus) < by_node[report.node] and not _one_gpu_each(report, look.gpus):
            problems.append(fail(f"{report.node}: {len(look.gpus)} GPUs for {by_node[report.node]} ranks"))
    problems += differing("number of GPUs", [(r.node, len(look.gpus)) for r, look in seen])
    for name, words in (("name", "GPU model"), ("driver", "driver"), ("memory_total_mib", "GPU memory in MiB")):
        values = [(r.node, getattr(gpu, name)) for r, look in seen for gpu in look.gpus]
        problems += differing(words, dict.fromkeys(values))
    if seen:
        problems += _recorder_off(reports)
    if looks and len(skipped) == len(looks):
        return Check("devices", tuple(problems), f"skipped: {looks[0][1].skipped}")
    models = some({gpu.name for _, look in seen for gpu in look.gpus}) or "none"
    return Check("devices", tuple(problems), f"gpus={sum(len(look.gpus) for _, look in seen)} model={models}")


def _illness(gpu: Gpu, busy: bool) -> Iterator[str]:
    if gpu.uncorrected_errors:
        yield f"has had {gpu.uncorrected_errors:,} uncorrected ECC errors since its driver came up; reset or drain it"
    if gpu.rows_pending or gpu.pages_pending:
        yield f"has memory {'rows to remap' if gpu.rows_pending else 'pages to retire'} at its next reset; reset it"
    if busy:
        return
    if gpu.temperature_celsius is not None and gpu.temperature_celsius > MAX_IDLE_CELSIUS:
        yield f"has {gpu.temperature_celsius:.0f} C with nobody on it, over {MAX_IDLE_CELSIUS:.0f}: see to its cooling"
    if gpu.power_watts and gpu.power_limit_watts and gpu.power_watts > MAX_IDLE_POWER_SHARE * gpu.power_limit_watts:
        yield f"draws {gpu.power_watts:.0f} W of {gpu.power_limit_watts:.0f} W with nobody on it that is seen"


def _one_gpu_each(report: NodeReport, gpus: Sequence[object]) -> bool:
    """A gate process of one rank that sees one GPU: CUDA_VISIBLE_DEVICES is the rank's, not the node's."""
    return len(report.ranks) == 1 and len(gpus) == 1


def _recorder_off(reports: Sequence[NodeReport]) -> list[Problem]:
    environment = reports[0].environment
    size = environment.get("TORCH_FR_BUFFER_SIZE") or environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or "0"
    if size == "0":
        return [warn("the flight recorder is off: set TORCH_FR_BUFFER_SIZE=2000, or a hang leaves no record")]
    return []
