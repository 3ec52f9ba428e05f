"""The environment variables of ranks and gate, and the gate's command line."""

from __future__ import annotations

import pytest

from wattwatch.trainer.launch.placement import (
    environment_variables,
    gate_commands,
    node_connections,
    parse_torch_version,
    rank_environment,
    resolve_placement,
)
from wattwatch.trainer.settings import JobFile, JobSettings, LaunchSettings

OLD, NEW = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"


def test_a_renamed_variable_is_set_under_the_name_that_the_installed_torch_reads() -> None:
    now = rank_environment({}, "/run/flight/attempt-01/nccl-", parse_torch_version("2.13.0+cpu"))
    assert now[NEW] == "2000"
    assert now["TORCH_FR_DUMP_TEMP_FILE"] == "/run/flight/attempt-01/nccl-"
    assert not {OLD, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"} & set(now), "torch warns of them at every start"
    assert now["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert float(now["TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"]) > 0
    before = rank_environment({}, "x", parse_torch_version("2.7.1"))
    assert before[OLD] == "2000"
    assert NEW not in before
    assert {OLD, NEW} <= set(rank_environment({}, "x", None)), "a launcher's host without torch sets both"


@pytest.mark.parametrize("name", [OLD, NEW])
@pytest.mark.parametrize(("torch", "known"), [((2, 13), NEW), ((2, 7), OLD)])
def test_a_value_from_the_job_file_applies_under_all_names_of_the_variable(
    name: str, torch: tuple[int, ...], known: str
) -> None:
    found = rank_environment({name: "20000"}, "x", torch)
    assert found[name] == found[known] == "20000"


def test_variables_of_the_job_file_that_are_not_in_the_table_are_passed_on() -> None:
    assert rank_environment({"NCCL_SOCKET_IFNAME": "ib0"}, "x", (2, 13))["NCCL_SOCKET_IFNAME"] == "ib0"


def test_every_row_has_a_reason_and_a_source() -> None:
    rows = environment_variables()
    assert all(row.why and row.source and row.names for row in rows)
    names = [one.name for row in rows for one in row.names]
    assert len(names) == len(set(names))


def job(**launch: object) -> JobFile:
    settings = JobSettings("/nfs/run", "/local/data", "/nfs/model", launch=LaunchSettings(**launch))  # type: ignore[arg-type]  # keyword sets
    return JobFile("/nfs/job.toml", "0" * 64, settings)


def test_the_gate_command_names_the_job_its_run_directory_and_its_ranks() -> None:
    made = job(nodes="gpu-[1-2]", ranks_per_node=8, via="ssh", port=29500, python="/opt/python")
    here = resolve_placement(made.settings.launch, {})
    first, second = gate_commands(here, made, "/nfs/run", "/nfs/run/checkpoints/step-00000500")
    text = " ".join(first)
    assert text.startswith("/opt/python -P -m wattwatch.trainer.cli gate --job /nfs/job.toml --run /nfs/run ")
    assert "--rendezvous gpu-1:29501 --resume /nfs/run/checkpoints/step-00000500 --ranks 0-7 --node gpu-1" in text
    assert " ".join(second).endswith("--ranks 8-15 --node gpu-2")


def test_nothing_is_resumed_unless_a_checkpoint_is_given() -> None:
    made = job()
    (command,) = gate_commands(resolve_placement(made.settings.launch, {}), made, "/nfs/run", None)
    assert "--resume" not in command


def test_the_gate_accepts_every_option_that_the_launcher_passes() -> None:
    from wattwatch.trainer.cli import gate_command

    known = {name for option in gate_command.params for name in option.opts}
    made = job(nodes="a,b", via="ssh")
    for command in gate_commands(resolve_placement(made.settings.launch, {}), made, "/run", "/run/x"):
        assert {part for part in command if part.startswith("--")} <= known


def test_every_connection_uses_the_interpreter_of_the_nodes() -> None:
    made = job(nodes="a,b", via="ssh", python="/opt/my python")
    for connection in node_connections(resolve_placement(made.settings.launch, {}), made.settings.launch):
        assert connection.command[-1] == "exec '/opt/my python' -P -m wattwatch.trainer.launch.node"
