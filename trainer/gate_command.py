"""`wattwatch-train gate`: may this job start? One process on each node, or one for each rank, at the same time."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Final

import click

from trainer.gate.gather import Rendezvous
from trainer.gate.report import GateSettings
from trainer.gate.run import Here, node_name, run_gate
from trainer.ranks import RANK_VARIABLES, WORLD_VARIABLES, Ranks, chosen_ranks
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from trainer.settings import JobFile

NODE_VARIABLES: Final = ("WATTWATCH_NODE", "SLURMD_NODENAME")
KEY_VARIABLES: Final = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


def read_defaults(ctx: click.Context, _: click.Parameter, path: str | None) -> JobFile | None:
    """The job's values become the defaults of the options. Imported here: a gate without a job file stays quick."""
    if path is None:
        return None
    from trainer.gate.job import option_defaults
    from trainer.settings import read_job

    job = read_job(path)
    ctx.default_map = option_defaults(job)
    return job


@click.command()
@click.option("--job", is_eager=True, callback=read_defaults, help="The job's TOML: all of the below but --resume.")
@click.option("--run", required=True, help="The run directory, shared by all nodes: gate.json, checkpoints/.")
@click.option("--data", required=True, help="Directory of the packed blocks on this node.")
@click.option("--world", type=click.IntRange(1), envvar=WORLD_VARIABLES, required=True, help="Ranks of the job.")
@click.option("--ranks", type=Ranks(), help="Those of this process, as 0-7; else the launcher's RANK, else all.")
@click.option("--rendezvous", help="HOST:PORT of rank 0's gate; else MASTER_ADDR and MASTER_PORT.")
@click.option("--micro-batch", type=click.IntRange(1), default=1, show_default=True, help="Blocks in a micro-step.")
@click.option("--accumulation", type=click.IntRange(1), default=8, show_default=True, help="Micro-steps in a step.")
@click.option("--seq-len", type=click.IntRange(2), help="Token ids in a block; else as packed.")
@click.option("--vocab-size", type=click.IntRange(1), help="Of the model; else of --model, else of the tokenizer.")
@click.option("--model", help="Directory of the model: vocabulary, tokenizer, size of a checkpoint.")
@click.option("--config", help="The job's configuration file: it must be the same on every node.")
@click.option("--resume", help="Checkpoint directory to resume from: it must be complete.")
@click.option("--keep", type=click.IntRange(1), default=2, show_default=True, help="Checkpoints that stay on disk.")
@click.option("--checkpoint-gigabytes", type=click.FloatRange(0, min_open=True), help="Of one; else the model's.")
@click.option("--node", envvar=NODE_VARIABLES, help="Name of this node in what is said. [default: its host name]")
@click.option("--wait", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds for ranks to come.")
@click.option(
    "--path-deadline", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Seconds for a path."
)
@click.option("--strict", is_flag=True, help="Warnings refuse the job too.")
@click.option("--json", "as_json", is_flag=True, help="Print gate.json, from every process.")
def gate_command(
    job: JobFile | None,
    run: str,
    data: str,
    world: int,
    ranks: tuple[int, ...] | None,
    rendezvous: str | None,
    micro_batch: int,
    accumulation: int,
    seq_len: int | None,
    vocab_size: int | None,
    model: str | None,
    config: str | None,
    resume: str | None,
    keep: int,
    checkpoint_gigabytes: float | None,
    node: str | None,
    wait: float,
    path_deadline: float,
    strict: bool,
    as_json: bool,
) -> None:
    """Six checks over all ranks before a job may start: world, blocks, shards, evenness, checkpoint, devices.

    Start it on every node at the same time; rank 0's process prints the verdict and writes RUN/gate.json. Exit code:
    0 pass, 1 warnings, 2 refused, 3 the gate itself broke.
    """
    more = {}
    if job:
        from trainer.gate.job import more_settings, ranks_on

        more = more_settings(job)
        if ranks is None and not any(os.environ.get(name) for name in RANK_VARIABLES):
            ranks = ranks_on(job, node_name(node))
    ranks = chosen_ranks(world, ranks)
    size = None if checkpoint_gigabytes is None else round(checkpoint_gigabytes * 1e9)
    settings = GateSettings(world, micro_batch, accumulation, keep, seq_len, vocab_size, size, **more)
    here = Here(node_name(node), ranks, data, run, model, resume, config, path_deadline)
    meeting = None if ranks == tuple(range(world)) else meeting_place(rendezvous)
    gate = run_gate(settings, here, meeting, wait)
    code = gate.verdict.exit_code(strict)
    if as_json:
        click.echo(json.dumps(gate.record, indent=1))
    elif 0 in ranks or len(gate.reports) == 1:
        click.echo("\n".join(gate.verdict.lines()))
        click.echo(last_line(gate.verdict.level, code, gate.record["gate_id"], gate.record["seconds"]))
    else:
        click.echo(f"gate {gate.verdict.level}: rank 0's process on {gate.reports[0].node} says why")
    if gate.unrecorded:
        click.echo(f"{run}/gate.json is not written: {gate.unrecorded}", err=True)
        code = 2
    sys.exit(code)


def last_line(level: str, code: int, gate_id: str, seconds: float | None) -> str:
    took = "" if seconds is None else f" in {seconds:.2f} s"
    word = "refused" if code == 2 else "open"
    return f"gate {word}: {level}{took}{', id ' + gate_id if gate_id else ''}"


def meeting_place(given: str | None) -> Rendezvous:
    """HOST:PORT, or the launcher's. Raises click.UsageError where nobody names one, Refusal for one that is none."""
    if given is None:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not host or not port:
            raise click.UsageError(
                "other processes hold ranks of this job: say where they meet, --rendezvous HOST:PORT"
            )
        given = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    host, _, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refusal(f"rendezvous {given!r}: expected HOST:PORT")
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    return Rendezvous(host, int(port), key)
