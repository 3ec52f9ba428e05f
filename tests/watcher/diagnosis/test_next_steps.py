"""The recommended next step: commands that can be pasted as they are, for every culprit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.watcher.diagnosis.hung_job_evidence import live, processes, record, records, stacks
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import load_evidence
from wattwatch.watcher.diagnosis.model import Culprit, DiagnosisVerdict, Evidence, HangCause
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls
from wattwatch.watcher.diagnosis.next_steps import recommend_next_step

RAS = Path(__file__).parents[2] / "data" / "ras"
NEVER = DiagnosisVerdict.NEVER_ARRIVED
PLACEHOLDER = re.compile(r"\b(PID|NODE|RANK|GPU|PATH_\w+)\b|None|[{}]")


def advice(cause: HangCause, culprits: tuple[Culprit, ...], evidence: Evidence | None = None) -> str:
    return recommend_next_step(
        NEVER, cause, culprits, evidence or Evidence(), no_hang=False, ras=None, collectives=None
    )


@pytest.mark.parametrize("cause", list(HangCause))
@pytest.mark.parametrize(
    "culprits",
    [(), (Culprit(9),), (Culprit(9, "n"),), (Culprit(9, "n", 1), Culprit(14)), tuple(map(Culprit, range(20)))],
    ids=["nobody", "of an unknown node", "of a known node", "two", "many"],
)
def test_no_placeholder_is_left_whatever_is_unknown(cause: HangCause, culprits: tuple[Culprit, ...]) -> None:
    for evidence in (Evidence(), Evidence(records()), Evidence(processes=processes({1: ("T", None)}))):
        assert PLACEHOLDER.search(advice(cause, culprits, evidence)) is None


def test_unknown_nodes_and_pids_are_described_in_words() -> None:
    assert "Run `py-spy dump` for the process of rank 9 on its node before" in advice(HangCause.RANK, (Culprit(9),))
    assert "for the process of rank 9 on node-02 before" in advice(HangCause.RANK, (Culprit(9, "node-02"),))
    assert "dmesg -T | tail -50` on the node of rank 9;" in advice(HangCause.HOST, (Culprit(9),))
    assert "`ssh n 'nvidia-smi -q; dmesg" in advice(HangCause.GPU, (Culprit(9, "n"),))


def test_every_culprit_has_its_command_up_to_three() -> None:
    held = Evidence(processes=processes())
    two = advice(HangCause.RANK, (Culprit(1, "node-01"), Culprit(6, "node-02")), held)
    assert two.startswith(
        "Run `ssh node-01 'py-spy dump --pid 4001'` and `ssh node-02 'py-spy dump --pid 4006'` before"
    )
    assert "the log of ranks 1, 6," in two
    five = advice(HangCause.RANK, tuple(Culprit(rank, "node-01") for rank in range(5)), held)
    assert five.count("ssh ") == 3
    assert "and 2 more like these before" in five


def test_a_node_has_one_command_however_many_of_its_ranks_are_named() -> None:
    assert advice(HangCause.HOST, tuple(Culprit(rank, "node-02") for rank in range(8))).count("ssh ") == 1


def test_pid_and_host_known_only_from_ras_are_in_the_command() -> None:
    polls = parse_polls("", [("ras.json", (RAS / "process_stopped_unresponsive.json").read_bytes())], None)
    found = diagnose(Evidence(ras=(polls,)))
    assert re.search(r"ssh 10\.0\.0\.\d+ 'py-spy dump --pid \d+'", found.advice)
    assert PLACEHOLDER.search(found.advice) is None


def test_with_a_single_node_the_culprit_is_on_it() -> None:
    on_one = tuple(replace(each, node="node-01") for each in processes() if each.rank != 3)
    found = diagnose(Evidence(records({3: None}), processes=on_one))
    assert "on node-01" in found.advice


def test_without_a_culprit_the_command_covers_all_known_nodes() -> None:
    found = diagnose(Evidence(processes=processes()))
    assert "on node-01 and `py-spy dump` for each rank on node-02 before the job ends" in found.advice


def test_settings_for_the_next_run_are_not_recommended_for_this_one() -> None:
    found = diagnose(Evidence(live=live()))
    now, _, later = found.advice.partition("For the next run")
    assert "TORCH" not in now
    assert "TORCH_FR_BUFFER_SIZE=2000 (before torch 2.8: TORCH_NCCL_TRACE_BUFFER_SIZE)" in later
    recorded = diagnose(Evidence((record(0, done=True),)))
    assert "TORCH" not in recorded.advice


def test_existing_evidence_is_not_requested_again() -> None:
    stood = diagnose(Evidence(stacks=stacks()))
    assert (stood.cause, "py-spy" in stood.advice) == (HangCause.UNKNOWN, False)
    assert "again in a minute" in stood.advice
    assert "py-spy" in diagnose(Evidence(processes=processes(), stacks=stacks(without=(3,)))).advice


def test_groups_that_wait_for_each_other_get_the_advice_about_their_order() -> None:
    found = diagnose(load_evidence(Path(__file__).parents[2] / "data" / "captures" / "crossed_groups"))
    assert "opposite orders" in found.advice


@pytest.mark.parametrize("node", ["-oProxyCommand=x", "a;reboot", "n'x", "`x`", "a b", "$(x)"])
def test_a_node_name_with_shell_characters_is_never_in_a_command(node: str) -> None:
    text = advice(HangCause.HOST, (Culprit(3, node),))
    assert node not in text
    assert "on the node of rank 3" in text
