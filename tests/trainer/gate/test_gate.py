"""The gate command: real files, real processes, real sockets on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.trainer.gate.gate_processes import Gates, change_manifest, finish, write_job, write_shard
from wattwatch.trainer.checkpoint.complete import MARKER, Completion, FileRecord, completion_text
from wattwatch.trainer.pack.manifest import blocks_sha256


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    gates = Gates(tmp_path)
    yield gates
    gates.end()


def test_two_nodes_exchange_reports_and_gate_json_contains_them(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [30, 33, 31, 30])
    second = gates.member(data, "2-3", 4)
    first = finish(gates.member(data, "0-1", 4))
    other = finish(second)
    assert (first.exit_code, other.exit_code) == (1, 1), first.out + first.err + other.err
    assert first.problems[0] == (
        "WARN  block counts differ by 3: rank 0 has 30 blocks, and rank 1 has 33; "
        "all ranks will stop after the smallest number of blocks"
    )
    assert other.out == "gate WARN: see the output of rank 0's process on node-0-1\n"
    record = gates.record
    assert (record["v"], record["world"], record["level"]) == (1, 4, "WARN")
    assert (record["global_min_blocks"], record["spread"], record["steps"]) == (30, 3, 3)
    assert record["blocks"] == {"0": 30, "1": 33, "2": 31, "3": 30}
    assert [check["name"] for check in record["checks"]] == [
        "world", "blocks", "shards", "evenness", "checkpoint", "devices",
    ]  # fmt: skip
    assert [report["node"] for report in record["reports"]] == ["node-0-1", "node-2-3"]
    assert record["reports"][1]["checkpoint"]["sees_rank_0"] is True
    assert record["gate_id"] in first.out
    assert len(record["inputs_sha256"]) == 64
    assert os.listdir(gates.run / "checkpoints") == []  # every mark is gone


def test_one_process_per_rank_takes_its_rank_from_the_launchers_environment(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16, 16])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gates.port), "WORLD_SIZE": "3"}
    processes = [gates.start(data, **place, RANK=str(rank)) for rank in (2, 1, 0)]
    answers = [finish(process) for process in processes]
    assert [answer.exit_code for answer in answers] == [0, 0, 0], [a.out + a.err for a in answers]
    assert "ranks=3/3" in answers[2].out


def test_the_same_inputs_have_the_same_hash_and_other_inputs_have_another(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    hashes = []
    for more in ((), (), ("--accumulation", 4)):
        assert gates.alone(data, 2, *more).exit_code == 0
        hashes.append((gates.record["inputs_sha256"], gates.record["gate_id"]))
    assert hashes[0][0] == hashes[1][0] != hashes[2][0]
    assert len({gate_id for _, gate_id in hashes}) == 3


def test_a_rank_that_does_not_report_is_named_by_all_that_did(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16, 16, 16])
    second = gates.member(data, "1", 4, "--wait", "3")
    first = finish(gates.member(data, "0", 4, "--wait", "3"))
    assert (first.exit_code, finish(second).exit_code) == (2, 2)
    assert first.problems[0] == "FAIL  ranks 2-3 did not report: rank 0's process waited 3 s"
    assert gates.record["level"] == "FAIL"


def test_without_rank_0_the_others_report_that(gates: Gates, tmp_path: Path) -> None:
    answer = finish(gates.member(write_job(tmp_path / "data", [16, 16]), "1", 2, "--wait", "1"))
    assert answer.exit_code == 2
    assert answer.problems[0].startswith(
        f"FAIL  rank 0 did not report: rank 0 did not answer at 127.0.0.1:{gates.port} for 1 s: "
    )


def test_a_rank_that_fails_on_its_own_node_still_reaches_the_others(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    second = gates.member(tmp_path / "nowhere", "1", 2)
    first = finish(gates.member(data, "0", 2))
    assert (first.exit_code, finish(second).exit_code) == (2, 2)
    assert f"FAIL  rank 1: {tmp_path}/nowhere/rank-00001.i32: no such file" in first.problems


def test_another_directory_with_the_same_name_is_not_shared(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    second = gates.start(
        data, "--run", tmp_path / "own", "--rendezvous", f"127.0.0.1:{gates.port}", "--world", 2, "--ranks", 1,
        "--node", "b",
    )  # fmt: skip
    (tmp_path / "own" / "checkpoints").mkdir(parents=True)
    first = finish(gates.member(data, "0", 2))
    assert first.exit_code == 2
    assert first.problems == [
        f"FAIL  b: {tmp_path}/own/checkpoints is not the same directory as on node-0; "
        "use a run directory on a shared file system"
    ]
    assert finish(second).exit_code == 2


def test_a_hung_path_costs_its_deadline_and_is_named(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16, 16])
    (data / "rank-00001.json").unlink()
    os.mkfifo(data / "rank-00001.json")  # opening it waits for a writer that never comes
    answer = gates.alone(data, 3, "--path-deadline", "5")
    assert answer.exit_code == 2
    assert f"FAIL  rank 1: {data}/rank-00001.i32: no answer in 5 s" in answer.problems
    assert f"FAIL  rank 2: {data}/rank-00002.i32: not inspected, because {data} does not respond" in answer.problems


def empty_shard(data: Path) -> None:
    write_shard(data, 1, 2, 0, rows=0, first_row=None, last_row=None, row_xor=0, samples=())


def ragged(data: Path) -> None:
    with (data / "rank-00001.i32").open("ab") as file:
        file.write(b"\0\0\0")


def high_id(data: Path) -> None:
    (data / "rank-00001.i32").write_bytes((100).to_bytes(4, "little") + (data / "rank-00001.i32").read_bytes()[4:])


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        (empty_shard, (),
         ("rank 1: its shard has no rows; pack more records", "rank 1 has 0 blocks, but one step needs 8")),
        (ragged, (),
         ("rank-00001.i32: the file is truncated: it has 1,027 bytes, not a whole number of blocks of 16",)),
        (high_id, (),
         ("token id 100 is outside the vocabulary of 100", "at offset 0 differ from those that were packed")),
        (lambda data: None, ("--vocab-size", "50"), ("rank 1: ", "token id 99 is outside the vocabulary of 50")),
        (lambda data: None, ("--seq-len", "32"), ("packed with --seq-len 16, but the job needs 32",)),
        (lambda data: None, ("--checkpoint-gigabytes", "1e9"),
         ("of free space, which is too little for 2 checkpoints",)),
        (lambda data: change_manifest(data, 1, world=4), (),
         ("rank 1: its blocks were packed for 4 ranks, but the job has 2",)),
        (lambda data: change_manifest(data, 1, tokenizer_sha256="9" * 64), (), ("tokenizer differs: ", "on rank 1")),
        (lambda data: change_manifest(data, 1, datasets_version="2.0"), (), ("datasets version differs: ", "2.0 on")),
        (lambda data: change_manifest(data, 1, rows="many"), (), ("rows: expected int, found 'many'",)),
        (lambda data: change_manifest(data, 1, samples=[5]), (), ("samples[0]: expected an object, found 5",)),
        (lambda data: (data / "rank-00001.json").write_text("{"), (), ("its manifest is invalid: not JSON",)),
        (lambda data: (data / "rank-00001.json").write_bytes(b"\xff\xfe"), (), ("rank 1: ", "UnicodeDecodeError")),
        (lambda data: (data / "rank-00001.json").unlink(), (), ("rank-00001.i32: no manifest",)),
        (lambda data: (data / "rank-00001.i32").unlink(), (), ("rank-00001.i32: no such file",)),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_one_line_that_names_the_problem_and_the_place(
    spoil: Any, arguments: tuple[str, ...], words: tuple[str, ...], gates: Gates, tmp_path: Path
) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    spoil(data)
    answer = gates.alone(data, 2, *arguments)
    assert answer.exit_code == 2
    for word in words:
        assert any(word in line for line in answer.problems), answer.out + answer.err
    assert "Traceback" not in answer.out + answer.err


def test_a_directory_that_cannot_be_written_refuses_the_job_and_the_missing_gate_json_is_reported(
    gates: Gates, tmp_path: Path
) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    gates.run.write_text("a file where a directory should be")
    answer = gates.alone(data, 2)
    assert answer.exit_code == 2
    assert any("cannot be written (" in line and "Not a directory" in line for line in answer.problems)
    assert answer.err == f"{gates.run}/gate.json was not written: {gates.run}/gate.json.tmp: Not a directory\n"


def complete(step: Path) -> None:
    """Marks what lies there as a whole checkpoint of two ranks, after one step of 8 blocks of 16."""
    files = {path.name: FileRecord(path.stat().st_size, "") for path in step.iterdir() if path.name != MARKER}
    hashes = {rank: sha256_of(step.parent / "data" / f"rank-{rank:05d}.i32") for rank in range(2)}
    done = Completion(1, "r", 1, 2, 1, 2 * 8 * 16, 2, "g", blocks_sha256(hashes), False, 0.0, files)
    (step / MARKER).write_text(completion_text(done))


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def safetensors(path: Path, tensor_bytes: int) -> None:
    header = json.dumps({path.stem: {"dtype": "BF16", "shape": [tensor_bytes // 2], "data_offsets": [0, tensor_bytes]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(tensor_bytes))


@pytest.mark.parametrize("damage", [None, "no mark", "truncated", "missing file", "no weights"])
def test_a_checkpoint_to_resume_from_must_be_complete(damage: str | None, gates: Gates, tmp_path: Path) -> None:
    data, step = write_job(tmp_path / "data", [16, 16]), tmp_path / "step-00000001"
    step.mkdir()
    for name in ("a", "b"):
        safetensors(step / f"{name}.safetensors", 64)
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (step / "model.safetensors.index.json").write_text(json.dumps(index))
    (step / "config.json").write_text("{}")
    complete(step)
    match damage:
        case "no mark":
            (step / "COMPLETE.json").unlink()
        case "truncated":
            (step / "b.safetensors").write_bytes((step / "b.safetensors").read_bytes()[:-1])
        case "missing file":
            (step / "b.safetensors").unlink()
        case "no weights":
            for path in step.glob("*safetensors*"):
                path.unlink()
    answer = gates.alone(data, 2, "--resume", step)
    assert answer.exit_code == (0 if damage is None else 2), answer.out
    if damage:
        assert any("cannot resume: " in line and str(step) in line for line in answer.problems)


def test_a_checkpoint_of_another_model_is_refused_with_its_first_different_tensor(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    step, model = tmp_path / "step-00000001", tmp_path / "model"
    for directory, size in ((step, 64), (model, 128)):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        safetensors(directory / "model.safetensors", size)
    complete(step)
    answer = gates.alone(data, 2, "--model", model, "--resume", step)
    assert answer.exit_code == 2
    assert (
        f"{step}: the checkpoint belongs to a different model: tensor model has shape 32 in the checkpoint, "
        "but has shape 64 in the model" in answer.out
    )


def test_a_job_that_still_runs_there_refuses_the_job_and_one_that_has_ended_does_not(
    gates: Gates, tmp_path: Path
) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    beat = {"run": "other", "rank": 3, "host": os.uname().nodename, "pid": os.getpid(), "phase": "train"}
    path = gates.run / "heartbeat" / "rank-00003.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(beat | {"t_wall": time.time()}))
    record = gates.run / "gate.json"
    record.write_text("the running job's")
    answer = gates.alone(data, 2)
    assert answer.exit_code == 2
    assert record.read_text() == "the running job's"
    assert f"rank 3 of run 'other' is still running in this run directory (pid {os.getpid()} on " in answer.out
    for ended in ({"phase": "done"}, {"t_wall": 1.0}, {"pid": 2**22 + 1}, {"host": "elsewhere", "t_wall": 1.0}):
        path.write_text(json.dumps(beat | {"t_wall": time.time()} | ended))
        assert gates.alone(data, 2).exit_code == 0, ended


def write_toml(tmp_path: Path, data: Path, more: str = "") -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    safetensors(model / "model.safetensors", 64)
    job = tmp_path / "job.toml"
    job.write_text(
        f'run = "{tmp_path}/run"\ndata = "{data}"\nmodel = "{model}"\n{more}\n[train]\naccumulation = 4\nepochs = 3\n'
        "[launch]\nranks_per_node = 2\n"
    )
    return job


def test_a_job_file_sets_all_options_and_options_override_it(gates: Gates, tmp_path: Path) -> None:
    job = write_toml(tmp_path, write_job(tmp_path / "data", [16, 16]))
    for more, accumulation in (((), 4), (("--accumulation", "2"), 2)):
        answer = finish(gates.command("--job", job, *more))
        assert answer.exit_code == 0, answer.out + answer.err
        settings = gates.record["settings"]
        assert (settings["world"], settings["accumulation"], settings["epochs"]) == (2, accumulation, 3)
    assert gates.record["config_sha256"] == sha256_of(job)
    assert gates.record["reports"][0]["checkpoint"]["write_bytes_per_second"] > 0
    assert os.listdir(gates.run / "checkpoints") == []


def test_a_missing_job_file_or_one_for_another_world_is_a_usage_error(gates: Gates, tmp_path: Path) -> None:
    job = write_toml(tmp_path, write_job(tmp_path / "data", [16, 16]))
    answer = finish(gates.command("--job", job, WORLD_SIZE="8"))
    assert (
        answer.exit_code,
        answer.err.startswith(f"{job}: the job has 1 x 2 = 2 ranks (nodes x ranks per node), "),
    ) == (
        2,
        True,
    )
    answer = finish(gates.command("--job", tmp_path / "none.toml"))
    assert (answer.exit_code, answer.err) == (2, f"{tmp_path}/none.toml: No such file or directory\n")


def test_vocabulary_and_tokenizer_are_compared_with_the_models_files(gates: Gates, tmp_path: Path) -> None:
    data, model = write_job(tmp_path / "data", [16, 16]), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 90}}))
    (model / "tokenizer.json").write_text(json.dumps({"model": "another"}))
    answer = gates.alone(data, 2, "--model", model)
    assert answer.exit_code == 2
    assert any("token id 99 is outside the vocabulary of 90" in line for line in answer.problems)
    assert any(
        "the blocks of ranks 0-1 were packed with a tokenizer that is not the model's" in line
        for line in answer.problems
    )
    (model / "config.json").write_text("{")
    assert gates.alone(data, 2, "--model", model).exit_code == 2


def test_other_clients_and_another_jobs_gate_do_not_disturb_the_gather(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    first = gates.member(data, "0", 2, SLURM_JOB_ID="7")
    for data_sent in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"wattwatch_gate": 1, "key": "7"}\n[[[\n', b"\xff" * 9000):
        client = connected(gates.port)
        with client:
            client.sendall(data_sent)
    other = finish(gates.member(data, "1", 2, "--wait", "600", SLURM_JOB_ID="8"))
    assert other.exit_code == 2
    assert "refused this process: the gate at this address belongs to another job" in other.out
    assert finish(gates.member(data, "1", 2, SLURM_JOB_ID="7")).exit_code == 0
    assert finish(first).exit_code == 0


def connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS)
        except ConnectionRefusedError:
            continue


def test_a_port_in_use_and_a_missing_rendezvous_are_usage_errors(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    with socket.create_server(("127.0.0.1", gates.port)):
        answer = finish(gates.member(data, "0", 2))
    assert answer.exit_code == 2
    assert answer.err.startswith(f"rank 0's gate cannot listen at 127.0.0.1:{gates.port}: Address already in use")
    answer = finish(gates.start(data, "--world", 2, "--ranks", 1))
    assert answer.exit_code == 2
    assert "set the address of rank 0's process with --rendezvous" in answer.err
    answer = finish(gates.start(data, "--world", 2, "--ranks", "1-5"))
    assert "rank 5 does not exist: the highest rank of this job is 1" in answer.err


def test_a_gate_that_is_killed_leaves_no_mark_behind(gates: Gates, tmp_path: Path) -> None:
    process = gates.member(write_job(tmp_path / "data", [16, 16]), "0", 2)
    checkpoints = gates.run / "checkpoints"
    wait_for(lambda: any(not name.endswith(".tmp") for name in listed(checkpoints)))
    process.kill()
    wait_for(lambda: not listed(checkpoints))


def listed(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_gate_imports_no_heavy_library(gates: Gates, tmp_path: Path) -> None:
    data = write_job(tmp_path / "data", [16, 16])
    process = gates.start(data, "--world", 2, PYTHONPROFILEIMPORTTIME="1")
    loaded = {
        line.rpartition("|")[2].strip() for line in finish(process).err.splitlines() if line.startswith("import ")
    }
    assert "wattwatch.trainer.gate.checks" in loaded
    assert not loaded & {"torch", "numpy", "datasets", "transformers", "tokenizers", "rich", "pydantic", "pickle"}
