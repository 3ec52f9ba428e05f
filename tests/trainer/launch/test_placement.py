"""Node names, and how nodes are reached."""

from __future__ import annotations

import pytest

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.launch.placement import (
    Placement,
    expand_node_list,
    format_address,
    node_connections,
    rank_commands,
    resolve_placement,
)
from wattwatch.trainer.settings import LaunchMethod, LaunchSettings


def test_nodes_keep_the_order_in_which_they_are_written_since_rank_0_is_on_the_first() -> None:
    assert expand_node_list("gpu-[09-11],a1") == ("gpu-09", "gpu-10", "gpu-11", "a1")
    assert expand_node_list("b, a,b") == ("b", "a")
    assert expand_node_list("r[1-2]n[1,3]") == ("r1n1", "r1n3", "r2n1", "r2n3")


@pytest.mark.parametrize("text", ["", " ", "gpu-[1-", "-oProxyCommand=x", "a b", "a/b"])
def test_an_invalid_node_name_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"launch\.nodes"):
        expand_node_list(text)


def test_one_local_node_uses_the_loopback_address() -> None:
    here = resolve_placement(LaunchSettings(ranks_per_node=4), {})
    assert here == Placement(LaunchMethod.LOCAL, ("localhost",), 4, "127.0.0.1", 29500)
    assert here.world == 4


def test_two_nodes_cannot_be_local() -> None:
    with pytest.raises(UserError, match="lists 2 nodes, but"):
        resolve_placement(LaunchSettings(nodes="a,b"), {})


def test_the_first_node_is_reached_by_its_name_or_the_given_address() -> None:
    assert resolve_placement(LaunchSettings(nodes="a,b", via="ssh"), {}).address == "a"
    assert resolve_placement(LaunchSettings(nodes="a,b", via="ssh", address="10.0.0.1"), {}).address == "10.0.0.1"
    assert format_address("fe80::1", 5) == "[fe80::1]:5"


def test_ssh_uses_one_connection_per_node_without_prompts_and_without_connection_sharing() -> None:
    launch = LaunchSettings(nodes="a,b", via="ssh", ssh_options=("-F", "/nfs/ssh config"), python="/opt/python")
    first, second = node_connections(resolve_placement(launch, {}), launch)
    assert (first.indices, second.indices) == ((0,), (1,))
    assert first.command[0] == "ssh"
    assert "BatchMode=yes" in first.command
    assert "ControlPath=none" in first.command
    assert first.command[-4:] == ("-F", "/nfs/ssh config", "a", "exec /opt/python -P -m wattwatch.trainer.launch.node")


def test_srun_is_one_step_on_all_nodes_of_the_allocation() -> None:
    launch = LaunchSettings(via="srun")
    here = resolve_placement(launch, {"SLURM_JOB_NODELIST": "gpu-[3-4]"})
    assert here.nodes == ("gpu-3", "gpu-4")
    (step,) = node_connections(here, launch)
    assert step.spread
    assert step.indices == (0, 1)
    for option in ("--nodes=2", "--ntasks-per-node=1", "--nodelist=gpu-3,gpu-4", "--kill-on-bad-exit=1"):
        assert option in step.command


def test_srun_uses_only_the_named_nodes_if_the_allocation_has_them() -> None:
    launch = LaunchSettings(nodes="gpu-4", via="srun")
    assert resolve_placement(launch, {"SLURM_JOB_NODELIST": "gpu-[3-4]"}).nodes == ("gpu-4",)
    with pytest.raises(UserError, match=r"nodes outside this Slurm allocation .*: gpu-4"):
        resolve_placement(launch, {"SLURM_JOB_NODELIST": "gpu-3"})


def test_srun_outside_an_allocation_says_how_to_start_one() -> None:
    with pytest.raises(UserError, match="sbatch or salloc"):
        resolve_placement(LaunchSettings(via="srun"), {})


def test_torchrun_never_restarts_by_itself_since_a_restart_must_pass_the_gate() -> None:
    launch = LaunchSettings(nodes="a,b", ranks_per_node=8, via="ssh", python="/opt/python")
    first, second = rank_commands(
        resolve_placement(launch, {}), launch, "run-1", ("/opt/python", "-m", "wattwatch.trainer.cli", "run")
    )
    assert first[:4] == ("/opt/python", "-P", "-m", "wattwatch.trainer.launch.torchrun")
    assert {"--nnodes=2", "--node-rank=0", "--nproc-per-node=8", "--max-restarts=0", "--master-addr=a"} <= set(first)
    assert "--node-rank=1" in second
    assert first[-5:] == ("--no-python", "/opt/python", "-m", "wattwatch.trainer.cli", "run")
