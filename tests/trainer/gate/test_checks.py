"""From reports to the verdict: what refuses a job, what is only a warning, and what the messages say."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.trainer.gate.reports import (
    PAPER_BLOCKS,
    SEQ_LEN,
    gpu,
    job,
    level_and_problems,
    manifest,
    with_node,
    with_shard,
)
from wattwatch.trainer.gate.checks import run_checks
from wattwatch.trainer.gate.model import (
    CheckLevel,
    CheckpointReport,
    DevicesReport,
    ModelReport,
    NodeReport,
    ResumeReport,
)
from wattwatch.trainer.gate.run import parse_shard_report
from wattwatch.trainer.pack.manifest import PackManifest, blocks_sha256, manifest_text
from wattwatch.trainer.run_directory import FoundHeartbeat

CHECKPOINT = CheckpointReport("/nfs/run/checkpoints", free_bytes=10**12, sees_rank_0=True)


def all_pass_except(reports: list[NodeReport], *names: str) -> bool:
    verdict = run_checks(reports)
    return all(check.level is CheckLevel.PASS for check in verdict.checks if check.name not in names)


def test_an_even_job_passes_all_six() -> None:
    verdict = run_checks(job((30_848,) * 16))
    assert [check.level for check in verdict.checks] == [CheckLevel.PASS] * 6
    assert verdict.exit_code(strict=True) == 0
    assert verdict.lines()[3] == "gate 4/6 evenness   PASS  spread=0 min=30,848 steps=3,856 lost=0.000%"


def test_the_papers_job_gets_a_warning_about_its_spread_and_the_minimum_is_recorded() -> None:
    verdict = run_checks(job())
    assert all_pass_except(job(), "evenness")
    even = verdict.evenness
    assert even is not None
    assert (even.global_min_blocks, even.spread, even.steps) == (30_835, 53, 3_854)
    assert (even.shortest_rank, even.longest_rank) == (3, 11)
    assert even.lost_share == pytest.approx(1 - 3_854 * 8 * 16 / sum(PAPER_BLOCKS))
    assert level_and_problems(verdict, "evenness") == (
        CheckLevel.WARN,
        "block counts differ by 53: rank 3 has 30,835 blocks, and rank 11 has 30,888; all ranks will stop after "
        "the smallest number of blocks",
    )
    assert (verdict.exit_code(strict=False), verdict.exit_code(strict=True)) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"trouble": "no such file", "manifest": None, "size_bytes": None}, "blocks", "FAIL",
         "rank 5: /local/rank-00005.i32: no such file"),
        ({"size_bytes": 30_870 * SEQ_LEN * 4 - 4}, "blocks", "FAIL", "not a whole number of blocks of 2048"),
        ({"size_bytes": 30_860 * SEQ_LEN * 4}, "blocks", "FAIL",
         "its manifest says 252,887,040 bytes in 30,870 blocks"),
        ({"differing_offsets": (4096,)}, "blocks", "FAIL",
         "the bytes at offset 4,096 differ from those that were packed"),
        ({"manifest_samples": ()}, "blocks", "FAIL", "lacks the hashes that are needed to verify the file"),
        ({"manifest_rank": 6}, "blocks", "FAIL", "its manifest belongs to rank 6"),
        ({"manifest_document_starts": 7}, "blocks", "FAIL", "where records begin is missing or has the wrong size"),
        ({"filesystem": "nfs4"}, "blocks", "WARN",
         "rank 5: blocks are on a network file system (nfs4), not on the node's local disk"),
        ({"manifest_world": 8}, "shards", "FAIL",
         "rank 5: its blocks were packed for 8 ranks, but the job has 16; pack the dataset again"),
        ({"manifest_rows": 0}, "shards", "FAIL", "rank 5: its shard has no rows"),
        ({"manifest_first_row": 50_004}, "shards", "FAIL", "but should have 10,000 (first row 50003, last row 60002)"),
        ({"manifest_row_xor": 1}, "shards", "FAIL", "some rows are missing or packed twice"),
        ({"manifest_contiguous": False}, "shards", "FAIL", "contiguous sharding differs: True on rank 0, rank 1, "),
        ({"manifest_datasets_version": "2.9.0"}, "shards", "FAIL", "datasets version differs: 5.2.0 on"),
        ({"manifest_tokenizer_sha256": "9" * 64}, "shards", "FAIL", "tokenizer differs: aaaaaaaaaaaa on"),
        ({"manifest_template_sha256": "9" * 64}, "shards", "FAIL", "chat template differs: bbbbbbbbbbbb on"),
        ({"manifest_eos_id": 1}, "shards", "FAIL", "EOS id differs"),
        ({"manifest_corpus_sha256": "9" * 64}, "shards", "FAIL", "corpus differs"),
        ({"manifest_tokenizers_version": "0.1"}, "shards", "WARN", "tokenizers version differs"),
        ({"manifest_empty_rows": 500}, "shards", "WARN", "500 of 160,003 rows produced no tokens"),
        ({"max_id": 151_669}, "evenness", "FAIL", "token id 151,669 is outside the vocabulary of 151,669"),
        ({"manifest_max_token_id": 151_700}, "evenness", "FAIL", "token id 151,700 is outside the vocabulary"),
        ({"min_id": -1}, "evenness", "FAIL", "token id -1 is negative"),
        ({"min_id": 7, "max_id": 7}, "evenness", "FAIL", "every token id that was read is 7"),
    ],
)  # fmt: skip
def test_a_problem_with_one_ranks_data_is_reported_with_the_rank(
    changes: dict[str, Any], check: str, level: str, words: str
) -> None:
    found, text = level_and_problems(run_checks(with_shard(job(), 5, **changes)), check)
    assert found == level
    assert words in text


def test_a_rank_with_less_data_than_one_step_refuses_the_job() -> None:
    level, text = level_and_problems(run_checks(job((40, 40, 7, 40))), "evenness")
    assert (level, text) == (
        CheckLevel.FAIL,
        "rank 2 has 7 blocks, but one step needs 8; pack more data, or lower train.accumulation",
    )


def test_many_blocks_in_no_step_are_a_separate_warning() -> None:
    _, text = level_and_problems(run_checks(job((100, 100, 100, 90))), "evenness")
    assert "9.74% of all blocks will not be used in any step" in text


def test_ranks_that_did_not_report_are_named_and_their_counts_are_not_guessed() -> None:
    verdict = run_checks(job()[:1], "waited 60 s")
    assert level_and_problems(verdict, "world") == (CheckLevel.FAIL, "ranks 8-15 did not report: waited 60 s")
    assert level_and_problems(verdict, "evenness") == (CheckLevel.FAIL, "block counts are unknown for ranks 8-15")
    assert verdict.evenness is None


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"ranks": tuple(range(7, 16))}, "FAIL", "rank 7 was reported 2 times instead of once, by node-a, node-b"),
        ({"ranks": tuple(range(8, 17))}, "FAIL", "rank 16 reported, but the highest rank of this job is 15"),
        ({"troubles": ("shards: KeyError: 'x'",)}, "FAIL", "node-b: shards: KeyError: 'x'"),
        ({"versions": {"python": "3.12.3", "torch": "2.12.0", "datasets": "5.2.0"}}, "FAIL",
         "torch differs: 2.13.0 on node-a; 2.12.0 on node-b"),
        ({"environment": {"TORCH_FR_BUFFER_SIZE": "2000"}}, "FAIL",
         "NCCL_DEBUG differs: WARN on node-a; not set on node-b"),
        ({"environment": {"TORCH_FR_BUFFER_SIZE": "2000", "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth1"}}, "WARN",
         "NCCL_SOCKET_IFNAME differs"),
        ({"code_sha256": "9" * 64}, "FAIL", "the trainer's code differs"),
        ({"model": ModelReport(config_sha256="9" * 64)}, "FAIL", "the configuration file differs"),
        ({"skew_seconds": -3.2}, "WARN", "node-b: its clock is 3.2 s ahead of the clock of rank 0's node"),
        ({"settings": replace(job()[0].settings, accumulation=4)}, "FAIL", "setting accumulation differs: 8 on node-a"),
    ],
)  # fmt: skip
def test_a_node_that_differs_from_the_other_is_named(changes: dict[str, Any], level: str, words: str) -> None:
    found, text = level_and_problems(run_checks(with_node(job(), 1, **changes)), "world")
    assert (found, words in text) == (level, True), text


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"checkpoint": None}, "FAIL", "node-b: the checkpoint directory was not inspected"),
        ({"checkpoint": replace(CHECKPOINT, trouble="Read-only file system")}, "FAIL", "cannot be written (Read-only"),
        ({"checkpoint": replace(CHECKPOINT, sees_rank_0=False)}, "FAIL",
         "node-b: /nfs/run/checkpoints is not the same directory as on node-a"),
        ({"checkpoint": replace(CHECKPOINT, free_bytes=100 * 10**9)}, "FAIL",
         "100.0 GB of free space, which is too little for 2 checkpoints of 62.0 GB"),
        ({"checkpoint": replace(CHECKPOINT, free_bytes=150 * 10**9)}, "WARN", "62.0 GB plus the one being written"),
        ({"model": ModelReport(resume=ResumeReport("x", trouble="x: no COMPLETE.json"))}, "FAIL",
         "cannot resume: x: no"),
    ],
)  # fmt: skip
def test_a_checkpoint_directory_that_cannot_take_a_save_is_named(
    changes: dict[str, Any], level: str, words: str
) -> None:
    found, text = level_and_problems(run_checks(with_node(job(), 1, **changes)), "checkpoint")
    assert (found, words in text) == (level, True), text


@pytest.mark.parametrize(
    ("devices", "level", "words"),
    [
        (None, "FAIL", "node-b: the GPUs were not inspected"),
        (DevicesReport(skipped="nvidia-smi was not found on this node"), "FAIL",
         "nvidia-smi was not found on node-b, but GPUs were found on node-a"),
        (DevicesReport(trouble="nvidia-smi gave no answer in 10.0 s"), "FAIL", "gave no answer"),
        (DevicesReport(gpus=tuple(gpu(n) for n in range(7))), "FAIL", "node-b: only 7 GPUs for 8 ranks"),
        (DevicesReport(gpus=tuple(gpu(n, driver="570.1") for n in range(8))), "FAIL", "driver differs"),
        (DevicesReport(gpus=tuple(gpu(n, name="NVIDIA H200") for n in range(8))), "FAIL", "GPU model differs"),
        (DevicesReport(gpus=tuple(gpu(n) for n in range(8)), processes=("pid 77 on GPU 3",)), "FAIL",
         "node-b: another process is using a GPU: pid 77 on GPU 3"),
        (DevicesReport(gpus=(*(gpu(n) for n in range(7)), gpu(7, memory_used_mib=90_000.0))), "WARN",
         "node-b: GPU 7 has 90,000 MiB of memory in use, but nvidia-smi lists no process"),
    ],
)  # fmt: skip
def test_gpus_that_are_missing_different_or_in_use_are_named(
    devices: DevicesReport | None, level: str, words: str
) -> None:
    found, text = level_and_problems(run_checks(with_node(job(), 1, devices=devices)), "devices")
    assert (found, words in text) == (level, True), text


def test_a_flight_recorder_that_is_off_is_a_warning_on_nodes_with_gpus() -> None:
    reports = [replace(report, environment={}) for report in job((8, 8))]
    assert level_and_problems(run_checks(reports), "devices")[0] is CheckLevel.WARN
    without = [
        replace(report, devices=DevicesReport(skipped="nvidia-smi was not found on this node")) for report in reports
    ]
    assert level_and_problems(run_checks(without), "devices") == (CheckLevel.PASS, "")


def test_token_ids_are_compared_with_the_models_vocabulary_if_it_is_known() -> None:
    model = ModelReport(vocab_size=150_000, tokenizer_file_sha256="f" * 64, tokenizer_meaning_sha256="e" * 64)
    reports = [replace(report, model=model) for report in job()]
    assert "outside the vocabulary of 150,000" in level_and_problems(run_checks(reports), "evenness")[1]
    assert level_and_problems(run_checks(reports), "shards")[0] is CheckLevel.PASS
    other = [replace(r, model=replace(model, tokenizer_file_sha256="1", tokenizer_meaning_sha256="2")) for r in job()]
    level, text = level_and_problems(run_checks(other), "shards")
    assert level is CheckLevel.FAIL
    assert "node-b: the blocks of ranks 8-15 were packed with a tokenizer that is not the model's" in text


RESUME = ResumeReport(
    "/nfs/step-00000500", step=500, tokens=500 * 8 * 16 * SEQ_LEN, world=16, optimizer=True,
    blocks_sha256=blocks_sha256({rank: f"{rank:064x}" for rank in range(16)}),
)  # fmt: skip


OTHER_WORLD = (
    "cannot resume: /nfs/step-00000500: the checkpoint was saved by 8 ranks, but the job has 16, and a resume "
    "needs the same number; use 8 ranks, or, to start with its weights, set `model` to the checkpoint "
    "and `run` to a new directory"
)


def resuming(settings: dict[str, Any], **changes: Any) -> list[NodeReport]:
    model = ModelReport(resume=replace(RESUME, **changes))
    return [replace(report, model=model, settings=replace(report.settings, **settings)) for report in job()]


@pytest.mark.parametrize(
    ("settings", "changes", "level", "words"),
    [
        ({"optimizer": True}, {}, "PASS", ""),
        # Blocks are packed for a number of ranks, so no setting makes a step of 8 ranks a step of 16.
        ({}, {"world": 8, "optimizer": False, "blocks_sha256": "9" * 64}, "FAIL", OTHER_WORLD),
        ({"optimizer": True}, {"world": 8, "blocks_sha256": "9" * 64}, "FAIL", OTHER_WORLD),
        ({"optimizer": True}, {"optimizer": False}, "WARN", "has no optimizer state"),
        ({}, {"blocks_sha256": "9" * 64}, "FAIL", "the run that saved the checkpoint used other data blocks than"),
        ({}, {"tokens": 7}, "FAIL", "used 7 tokens in 500 steps, but this job would have used 131,072,000"),
        ({}, {"step": 3_854, "tokens": None}, "WARN", "all 3,854 steps are already done"),
        ({}, {"step": 3_855, "tokens": None}, "FAIL",
         "the checkpoint was saved after 3,855 steps, but the job has only 3,854"),
        ({"epochs": 2}, {"step": 3_855, "tokens": None}, "PASS", ""),
        ({}, {"other_shape": "a.weight is [2] in the checkpoint, but [3] in the model"}, "FAIL",
         "the checkpoint belongs to a different model: a.weight is [2] in the checkpoint, but [3]"),
    ],
)  # fmt: skip
def test_a_checkpoint_with_other_data_shapes_or_ranks_is_not_resumed_from(
    settings: dict[str, Any], changes: dict[str, Any], level: str, words: str
) -> None:
    found, text = level_and_problems(run_checks(resuming(settings, **changes)), "checkpoint")
    assert (found, words in text) == (level, True), text
    if level == "FAIL":
        assert text.startswith("node-a, node-b: cannot resume: /nfs/step-00000500: ")


def with_live_rank(alive: tuple[bool | None, bool | None]) -> list[NodeReport]:
    beats = [(FoundHeartbeat("other", 3, "host-b", 77, 4.0, one),) for one in alive]
    return [replace(r, checkpoint=replace(CHECKPOINT, beats=beat)) for r, beat in zip(job(), beats, strict=True)]


@pytest.mark.parametrize(
    ("alive", "level"),
    [((None, None), "FAIL"), ((None, True), "FAIL"), ((None, False), "PASS"), ((False, None), "PASS")],
)
def test_a_rank_that_still_runs_in_the_run_directory_refuses_the_job(
    alive: tuple[bool | None, bool | None], level: str
) -> None:
    found, text = level_and_problems(run_checks(with_live_rank(alive)), "checkpoint")
    assert found == level
    assert (
        "rank 3 of run 'other' is still running in this run directory (pid 77 on host-b, last heartbeat 4 s ago)"
        in text
    ) == (level == "FAIL")


@pytest.mark.parametrize(
    ("rate", "level", "seconds"),
    [(2e9, "PASS", ""), (1e7, "WARN", "about 3,100 s, which is more than 50% of the timeout of 3,600 s")],
)
def test_a_checkpoint_directory_that_is_too_slow_for_a_save_is_a_warning(rate: float, level: str, seconds: str) -> None:
    reports = [
        replace(
            report,
            checkpoint=replace(CHECKPOINT, write_bytes_per_second=rate),
            settings=replace(report.settings, save_timeout_seconds=3600.0),
        )
        for report in job()
    ]
    found, text = level_and_problems(run_checks(reports), "checkpoint")
    assert (found, seconds in text) == (level, True), text


@pytest.mark.parametrize(
    ("health", "words"),
    [
        ({"uncorrected_errors": 2}, "GPU 7 has had 2 uncorrected ECC errors"),
        ({"rows_pending": True}, "GPU 7 needs a reset to remap memory rows"),
        ({"pages_pending": True}, "GPU 7 needs a reset to retire memory pages"),
        ({"temperature_celsius": 71.0}, "GPU 7 is at 71 C while idle"),
        ({"power_watts": 600.0, "power_limit_watts": 1100.0}, "GPU 7 draws 600 W (its limit is 1100 W)"),
    ],
)
def test_a_gpu_in_poor_health_is_a_warning(health: dict[str, Any], words: str) -> None:
    devices = DevicesReport(gpus=(*(gpu(n) for n in range(7)), gpu(7, **health)))
    found, text = level_and_problems(run_checks(with_node(job(), 1, devices=devices)), "devices")
    assert (found, f"node-b: {words}" in text) == (CheckLevel.WARN, True), text


@pytest.mark.parametrize(
    ("evenness", "steps", "words"),
    [("pad", 3_861, "ranks with fewer blocks will repeat their first blocks"), ("off", 3_854, "the job will hang")],
)
def test_the_number_of_steps_is_the_one_that_the_ranks_will_agree_on(evenness: str, steps: int, words: str) -> None:
    verdict = run_checks([replace(r, settings=replace(r.settings, evenness=evenness)) for r in job()])
    assert verdict.evenness is not None
    assert verdict.evenness.steps == steps
    assert words in level_and_problems(verdict, "evenness")[1]


def test_a_check_prints_sixteen_problems_at_most() -> None:
    reports = job((8,) * 64)
    for rank in range(64):
        reports = with_shard(reports, rank, manifest_world=32)
    lines = run_checks(reports).lines()
    assert sum("packed for 32 ranks" in line for line in lines) == 16
    assert "         and 48 more; gate.json lists all problems" in lines


PIECE = {"offset": -1, "bytes": 9, "sha256": ""}
JUNK: tuple[Any, ...] = (None, -1, 0, 10**30, "x", "", 1.5, True, [], [1], {}, {"a": 1}, [PIECE])


@pytest.mark.parametrize("field", [field.name for field in fields(PackManifest)])
def test_no_manifest_however_damaged_crashes_the_gate(field: str) -> None:
    whole = job()
    text = manifest_text(manifest(5, 16, PAPER_BLOCKS[5]))
    for junk in JUNK:
        data = json.loads(text) | {field: junk}
        answer = {"rank": 5, "size_bytes": 30_870 * SEQ_LEN * 4, "min_id": 3, "max_id": 9}
        report = parse_shard_report("/local/rank-00005.i32", answer | {"manifest_text": json.dumps(data)})
        shards = tuple(report if old.rank == 5 else old for old in whole[0].shards)
        run_checks(with_node(whole, 0, shards=shards)).lines()
