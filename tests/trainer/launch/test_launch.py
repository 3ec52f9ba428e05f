"""Launches from end to end on one node: real gate, real processes, ranks that end as planned."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.trainer.command_line import run_wattwatch_train
from tests.trainer.gate.gate_processes import write_shard
from tests.trainer.launch.jobs import QUICK, ROOT, MadeJob, left_running, rank_program
from tests.trainer.launch.rank_program import Plan
from wattwatch.trainer.checkpoint.complete import find_newest_complete
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.launch.attempt import InterruptCount
from wattwatch.trainer.launch.launcher import JobLauncher, LaunchOptions
from wattwatch.trainer.launch.processes import descendants
from wattwatch.trainer.settings import read_job_file


def newest_step(job: MadeJob) -> int | None:
    completion = find_newest_complete(job.run.checkpoints).completion
    return completion.step if completion else None


def test_a_job_runs_to_its_last_checkpoint(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    assert job.start() == 0
    assert job.printed("gate passed: PASS")
    assert job.printed("step 4/4 loss 1.0"), "rank 0's log is shown to its end"
    assert job.output[-1] == "launch: done: all 4 steps are done and saved"
    assert newest_step(job) == 4
    assert job.left_running() == []


def test_after_a_rank_is_killed_the_next_attempt_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(rank=1, at=3, until_attempt=1, act="kill"))
    job.write()
    assert job.start() == 0
    assert job.printed(
        "launch: retry: attempt 1: rank 1 on localhost was killed by SIGKILL after step 3; "
        "the other ranks failed as a result"
    )
    assert job.printed("launch: attempt 2, from", "step-00000002")
    assert job.printed("begins at step 2")
    assert job.left_running() == []


def test_retries_run_out_and_the_last_line_says_what_is_saved(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(rank=1, at=3, until_attempt=99, act="code:5"), launch={"retries": 2})
    job.write()
    assert job.start() == 5
    assert len([line for line in job.output if line.startswith("launch: attempt ")]) == 3
    assert job.output[-1] == (
        "launch: failed: attempt 3: rank 1 on localhost exited with code 5 after step 3: as planned; the other "
        "ranks failed as a result; no retries are left; the last saved step is 2 of 4"
    )


def test_ranks_that_all_exit_with_0_before_the_last_step_have_not_done_the_work(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, ranks=1, plan=Plan(rank=0, at=3, until_attempt=99, act="code:0"), launch={"retries": 1})
    job.write()
    assert job.start() == 5
    assert "all ranks exited with code 0, but the last step is not saved" in job.output[-1]


def test_a_rank_that_refuses_is_not_retried(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(rank=0, at=0, until_attempt=99, act="code:2"))
    job.write()
    assert job.start() == 2
    assert job.output[-1].startswith("launch: refused: attempt 1: rank 0 on localhost exited with code 2")


def test_a_rank_that_fails_at_once_is_not_retried_and_its_log_is_quoted(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, ranks=1, plan=Plan(rank=0, at=0, until_attempt=99, act="exit:1"))
    job.write()
    assert job.start() == 5
    assert "exited with code 1; the last line of its log is: node localhost rank 0 begins at step 0" in job.output[-1]


def test_an_empty_shard_starts_nothing(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    write_shard(tmp_path / "data", 1, 2, 0)
    assert job.start() == 2
    assert job.printed("FAIL", "rank 1")
    assert job.output[-1] == "launch: refused: the gate refused the job; no rank was started"
    assert not list((job.run.path / "logs").iterdir()), "no attempt has logs, since no torchrun was started"


def test_warnings_are_shown_and_refuse_the_job_only_if_it_is_strict(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    write_shard(tmp_path / "data", 1, 2, 33)
    assert job.start() == 0
    assert job.printed("WARN", "spread")
    strict = MadeJob(tmp_path, launch={"strict": True})
    strict.write()
    write_shard(tmp_path / "data", 1, 2, 33)
    assert strict.start() == 2


def test_a_damaged_newest_checkpoint_is_named_and_an_older_one_used(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(steps=6, rank=1, at=5, until_attempt=1, act="kill"), launch={"retries": 0})
    job.write()
    assert job.start() == 5
    weights = job.run.checkpoint(4) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")  # same size, other bytes
    assert job.start() == 0
    assert job.printed("skipped a checkpoint", "step-00000004/model.safetensors", "SHA-256")
    assert job.printed("launch: attempt 2, from", "step-00000002")


def test_fresh_moves_old_checkpoints_aside_so_that_no_retry_resumes_from_them(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    assert job.start() == 0
    job.plan = Plan(rank=1, at=1, until_attempt=2, act="kill")
    job.write()
    assert job.start(fresh=True) == 0
    assert (job.run.path / "checkpoints-before-attempt-02" / "step-00000004").is_dir()
    assert job.printed("launch: attempt 3, from the beginning")


def test_one_signal_saves_and_exits_with_4_and_the_next_launch_continues(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, blocks=8 * 1000, plan=Plan(steps=10_000, save_every=10_000))
    job.write()

    def stop_at_step_3(line: str, interrupts: InterruptCount) -> None:
        interrupts.count = 1 if line.startswith("step 3/") else interrupts.count

    assert job.start(on_line=stop_at_step_3) == 4
    assert job.printed("asked the ranks to save and stop")
    saved = newest_step(job)
    assert saved
    assert saved >= 3
    assert job.output[-1] == (
        f"launch: stopped by a signal at step {saved} of 10,000, which is saved; run the same command to continue"
    )
    assert not job.run.stop_file.exists(), "the launcher created it, and removes it"
    assert job.left_running() == []
    job.plan = Plan(steps=saved + 2)
    job.write()
    assert job.start() == 0
    assert not job.printed("launch: removed", "stop")
    assert job.printed(f"begins at step {saved}")


def test_two_signals_end_everything_at_once(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(steps=10_000, save_every=10_000, children=True))
    job.write()

    def insist(line: str, interrupts: InterruptCount) -> None:
        interrupts.count = 2 if line.startswith("step 3/") else interrupts.count

    assert job.start(on_line=insist) == 130
    assert job.printed("terminating the ranks now")
    assert job.left_running() == [], "not even what ignores SIGTERM in a session of its own"


def test_a_signal_between_two_attempts_ends_the_launch(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(rank=1, at=3, until_attempt=9, act="kill"), launch={"retry_wait_seconds": 600.0})
    job.write()

    def stop_in_the_pause(line: str, interrupts: InterruptCount) -> None:
        interrupts.count = 1 if line.startswith("launch: retry 1 of") else interrupts.count

    assert job.start(on_line=stop_in_the_pause) == 130


def test_a_job_file_that_changes_during_the_launch_ends_it(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(rank=1, at=3, until_attempt=9, act="kill"))
    job.write()

    def edit(line: str, interrupts: InterruptCount) -> None:
        if line.startswith("launch: retry 1 of"):
            job.file.write_text(job.file.read_text() + "# edited\n")

    assert job.start(on_line=edit) == 2
    assert "has changed since this launch began" in job.output[-1]


def test_a_run_directory_that_cannot_be_created_is_reported_in_one_sentence(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match=r"run.*nothing was started"):
        job.start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_no_rank_outlives_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    job = MadeJob(tmp_path, plan=Plan(steps=10_000, save_every=10_000, children=True))
    program = (
        "import sys\n"
        "from wattwatch.trainer.launch.launcher import JobLauncher, LaunchOptions, read_job_file\n"
        "from wattwatch.trainer.launch.attempt import count_interrupts\n"
        "from tests.trainer.launch.jobs import QUICK, rank_program\n"
        "print_line = lambda line: print(line, flush=True)\n"
        "with count_interrupts() as counted:\n"
        "  options = LaunchOptions(None, False, rank_program, QUICK)\n"
        "  sys.exit(JobLauncher(read_job_file(sys.argv[1]), options, counted, print_line).run())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(job.write())], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert any(line.startswith("step 3/") for line in launcher.stdout)
        assert len(left_running(str(tmp_path))) > 4, "launcher, node program, torchrun and ranks"
        launcher.send_signal(number)
        text = launcher.stdout.read()
        by = {signal.SIGINT: "Ctrl-C"}.get(number, number.name)
        assert number == signal.SIGKILL or f"launch: stopped by {by} at step " in text
        assert launcher.wait(DEADLINE_SECONDS) == (-number if number == signal.SIGKILL else 4)
        await_nothing_left(str(tmp_path))


def test_a_node_program_that_is_killed_is_a_lost_node_and_no_rank_outlives_it(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(steps=10_000, save_every=10_000), launch={"retries": 0})
    job.write()

    def kill_node_program(line: str, interrupts: InterruptCount) -> None:
        if line.startswith("step 3/"):
            (pid,) = [pid for pid in descendants(os.getpid()) if b"wattwatch.trainer.launch.node" in command(pid)]
            os.kill(pid, signal.SIGKILL)

    assert job.start(on_line=kill_node_program) == 5
    assert "localhost was lost" in job.output[-1]
    await_nothing_left(str(tmp_path))


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def await_nothing_left(mark: str) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while (left := left_running(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def test_print_shows_the_plan_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = MadeJob(tmp_path, launch={"nodes": "gpu-[1-2]", "via": "ssh"})
    answer = run_wattwatch_train(capsys, "launch", job.write(), "--print")
    assert answer.exit_code == 0
    assert "TORCH_FR_BUFFER_SIZE=2000" in answer.out
    assert "# gate on gpu-2" in answer.out
    assert "# ranks on gpu-1" in answer.out
    assert "--no-python" in answer.out
    assert f"-P -m wattwatch.trainer.cli run {job.file}" in answer.out
    assert not job.run.path.exists()


def test_invalid_settings_are_refused_with_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = MadeJob(tmp_path, launch={"nodes": "a,b"})
    answer = run_wattwatch_train(capsys, "launch", job.write())
    assert answer.exit_code == 2
    assert answer.err == 'launch.nodes lists 2 nodes, but launch.via is "local": set launch.via to "ssh" or "srun"\n'


def test_attempts_of_an_earlier_launch_keep_their_logs(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, ranks=1, plan=Plan(rank=0, at=1, until_attempt=1, act="kill"), launch={"retries": 0})
    job.write()
    assert job.start() == 5
    assert job.start() == 0
    assert {path.name for path in (job.run.path / "logs").iterdir()} == {"attempt-01", "attempt-02"}
    assert json.loads(job.run.run_json.read_text())["attempt"] == 2


def test_a_port_that_is_in_use_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        job.launch = {"port": port}
        job.write()
        assert job.start() == 2
    assert (
        job.output[-1]
        == f"launch: refused: port {port} on localhost is in use; set launch.port to a free port; no rank was started"
    )
    assert not list((job.run.path / "logs").iterdir())
    assert job.start() == 0, "it is free again"


def test_a_torchrun_that_fails_before_any_rank_started_is_quoted_and_retried_once(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    assert job.start("tests.trainer.launch.no_such_torchrun") == 5
    text = "torchrun on localhost failed before any rank started: "
    assert len([line for line in job.output if text in line]) == 2
    assert job.output[-1].startswith(f"launch: failed: attempt 2: {text}")
    assert "No module named tests.trainer.launch.no_such_torchrun" in job.output[-1]
    assert "The previous attempt failed in the same way" in job.output[-1]


def write_live_heartbeat(job: MadeJob, pid: int) -> None:
    """A fresh heartbeat of a process on this host."""
    beat = {"run": "other", "rank": 0, "host": os.uname().nodename, "pid": pid, "phase": "train"}
    heartbeat = job.run.heartbeat(0)
    heartbeat.parent.mkdir(parents=True, exist_ok=True)
    heartbeat.write_text(json.dumps(beat | {"restart": -1, "t_wall": time.time()}))


NO_SUCH_PID = 2**22 + 1  # above any pid


def test_a_second_launch_changes_neither_stop_file_nor_gate_json_of_the_running_job(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    write_live_heartbeat(job, os.getpid())
    job.run.stop_file.touch()
    job.run.gate_json.write_text("the running job's")
    assert job.start() == 2
    assert job.printed("is still running in this run directory")
    assert job.printed("gate.json was not written: the existing file belongs to a job that is still running")
    assert job.run.stop_file.exists()
    assert job.run.gate_json.read_text() == "the running job's"
    write_live_heartbeat(job, NO_SUCH_PID)
    assert job.start() == 0
    assert job.printed("launch: removed an old stop file")


def test_files_of_a_running_smoke_test_stay_until_the_gate_finds_no_live_rank(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    kept = job.run.checkpoints / "step-00000002"
    kept.mkdir(parents=True)
    (kept / "old").touch()
    write_live_heartbeat(job, os.getpid())
    options = LaunchOptions("boundary", False, rank_program, QUICK, grace_seconds=2.0)
    assert JobLauncher(read_job_file(str(job.file)), options, InterruptCount(), job.output.append).run() == 2
    assert (kept / "old").exists()
    write_live_heartbeat(job, NO_SUCH_PID)
    assert JobLauncher(read_job_file(str(job.file)), options, InterruptCount(), job.output.append).run() == 0
    assert not kept.joinpath("old").exists()


def test_a_stop_file_created_during_the_gate_is_meant_for_this_launch(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, plan=Plan(steps=10_000, save_every=10_000))
    job.write()
    job.run.path.mkdir()
    job.run.stop_file.touch()
    os.utime(job.run.stop_file, (1, 1))

    def stop_at_the_gate(line: str, interrupts: InterruptCount) -> None:
        if line.startswith("gate passed"):
            job.run.stop_file.touch()

    assert job.start(on_line=stop_at_the_gate) == 4
    assert not job.printed("launch: removed")
    assert job.output[-1].startswith("launch: stopped by the stop file at step ")
    assert job.run.stop_file.exists(), "the launcher did not create it"


def test_a_job_that_is_done_is_not_started_again(tmp_path: Path) -> None:
    job = MadeJob(tmp_path)
    job.write()
    assert job.start() == 0
    job.output.clear()
    assert job.start() == 0
    assert job.output == ["launch: nothing to do: step 4 of 4 is saved"]
    job.file.write_text(job.file.read_text() + "# it may want more steps now\n")
    job.start()
    assert job.printed("gate passed"), "with a changed job file the gate decides whether there is something to do"
