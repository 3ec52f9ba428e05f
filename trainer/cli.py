"""`wattwatch-train pack SOURCE`: records to token blocks on this node, before any GPU is held for it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.gate.gather import Rendezvous
from wattwatch.trainer.gate.model import GateSettings
from wattwatch.trainer.gate.run import GateProcess, node_name, run_gate
from wattwatch.trainer.launch.attempt import count_interrupts
from wattwatch.trainer.launch.launcher import JobLauncher, LaunchOptions, plan_lines
from wattwatch.trainer.launch.placement import Placement, format_address, resolve_placement
from wattwatch.trainer.pack.manifest import PackManifest
from wattwatch.trainer.ranks import RANK_VARIABLES, WORLD_VARIABLES, RanksOption, select_ranks
from wattwatch.trainer.settings import JobFile, read_job_file, settings_help, smoke_test_job

if TYPE_CHECKING:
    from wattwatch.trainer.settings import JobFile


@click.command()
@click.argument("source")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory, local to the node.")
@click.option("--tokenizer", required=True, help="Directory of save_pretrained, or a name on the hub.")
@click.option("--world", type=click.IntRange(1), envvar=WORLD_VARIABLES, required=True, help="Ranks of the job.")
@click.option("--ranks", type=RanksOption(), help="Those of this node, as 0-7; else the launcher's RANK, else all.")
@click.option("--seq-len", type=click.IntRange(2), default=2048, show_default=True, help="Token ids in a block.")
@click.option("--split", default="train", show_default=True)
@click.option("--column", help="Column of the records: text, or lists of messages; else text or messages.")
@click.option("--contiguous/--strided", default=True, show_default=True, help="How rows are dealt to ranks.")
@click.option("--document-mask", is_flag=True, help="Also write where records begin.")
@click.option("--workers", type=click.IntRange(1), help="Tokenising processes. [default: one per CPU core]")
@click.option("--json", "as_json", is_flag=True, help="The manifests, as a list.")
def pack_command(
    source: str,
    output: Path,
    tokenizer: str,
    world: int,
    ranks: tuple[int, ...] | None,
    seq_len: int,
    split: str,
    column: str | None,
    contiguous: bool,
    document_mask: bool,
    workers: int | None,
    as_json: bool,
) -> None:
    """Tokenise each record of SOURCE once and pack the ids into fixed blocks: one .i32 file and manifest per rank.

    SOURCE is JSONL (a path or a glob), a directory of datasets' save_to_disk, or the name of a dataset. Same input,
    bit-same output. Exit code 2: refused, and the rank it names was not published.
    """
    ranks = select_ranks(world, ranks)
    from wattwatch.trainer.pack.corpus import read_corpus, shard_corpus
    from wattwatch.trainer.pack.packing import PackSettings, pack_shard
    from wattwatch.trainer.pack.tokens import TokenizerPool, read_tokenizer

    corpus = read_corpus(source, split, column)
    recipe, facts = read_tokenizer(tokenizer, corpus.kind)
    settings = PackSettings(seq_len, document_mask)
    pool = TokenizerPool(recipe, workers or len(os.sched_getaffinity(0)))
    shards = [shard_corpus(corpus, world, rank, contiguous) for rank in ranks]
    manifests: list[PackManifest] = []
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with pool, Progress(*bar, console=Console(stderr=True)) as progress:
        for shard in shards:
            task = progress.add_task(f"rank {shard.rank}", total=shard.row_ids.size)
            manifest = pack_shard(corpus, shard, settings, facts, pool, output, partial(progress.advance, task))
            manifests.append(manifest)
            if not as_json:
                click.echo(describe_manifest(manifest))
    if as_json:
        click.echo(json.dumps([asdict(manifest) for manifest in manifests], indent=1))


def describe_manifest(manifest: PackManifest) -> str:
    return (
        f"rank {manifest.rank} of {manifest.world}: {manifest.rows:,} rows ({manifest.empty_rows:,} empty), "
        f"{manifest.tokens:,} tokens, {manifest.blocks:,} blocks of {manifest.seq_len:,}, "
        f"{manifest.dropped_tokens:,} tokens dropped"
    )


# What a job file tells the gate, so that the gate asks for the very job that is launched.


def gate_option_defaults(job: JobFile) -> dict[str, Any]:
    """Values of the command's options, by their names, where nobody gives them. Raises Refusal."""
    said, here = job.settings, resolve_placement(job.settings.launch, os.environ)
    for name in WORLD_VARIABLES:
        if os.environ.get(name, str(here.world)) != str(here.world):
            raise UserError(
                f"{job.path}: {len(here.nodes)} nodes of {here.ranks_per_node} ranks are a world of {here.world}, the "
                f"environment says {name}={os.environ[name]}: correct launch.nodes or launch.ranks_per_node"
            )
    return {
        "run": said.run,
        "data": said.data,
        "model": said.model,
        "config": job.path,
        "world": here.world,
        "rendezvous": format_address(here.address, here.port + 1),
        "micro_batch": said.train.micro_batch,
        "accumulation": said.train.accumulation,
        "keep": said.checkpoint.keep,
        "wait": said.launch.gate_wait_seconds,
        "strict": said.launch.strict,
    }


def gate_settings_from_job(job: JobFile) -> dict[str, Any]:
    """Fields of GateSettings for which there are no options."""
    train, checkpoint = job.settings.train, job.settings.checkpoint
    return {
        "epochs": train.epochs,
        "evenness": train.evenness,
        "document_mask": train.document_mask,
        "optimizer": checkpoint.optimizer,
        "random_weights": train.random_weights,
        "file_bytes": round(checkpoint.file_gigabytes * 1e9),
        "save_timeout_seconds": float(checkpoint.timeout_seconds),
    }


def ranks_on_node(job: JobFile, node: str) -> tuple[int, ...]:
    """Those that the job places on `node`. Raises Refusal where it names no such node."""
    here = resolve_placement(job.settings.launch, os.environ)
    if len(here.nodes) == 1:
        return tuple(here.ranks(0))
    return tuple(here.ranks(_node_index(here, node, job.path)))


def _node_index(here: Placement, node: str, path: str) -> int:
    for name in (node, node.partition(".")[0]):
        if name in here.nodes:
            return here.nodes.index(name)
    shown = ", ".join(here.nodes[:4]) + (", ..." if len(here.nodes) > 4 else "")
    raise UserError(f"{path}: this node, {node}, is none of launch.nodes, {shown}: say which with --node or --ranks")


# `wattwatch-train gate`: may this job start? One process on each node, or one for each rank, at the same time.

NODE_NAME_VARIABLES: Final = ("WATTWATCH_NODE", "SLURMD_NODENAME")
JOB_ID_VARIABLES: Final = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


def read_job_defaults(ctx: click.Context, _: click.Parameter, path: str | None) -> JobFile | None:
    """The job's values become the defaults of the options. Imported here: a gate without a job file stays quick."""
    if path is None:
        return None
    from wattwatch.trainer.settings import read_job_file

    job = read_job_file(path)
    ctx.default_map = gate_option_defaults(job)
    return job


@click.command()
@click.option("--job", is_eager=True, callback=read_job_defaults, help="The job's TOML: all of the below but --resume.")
@click.option("--run", required=True, help="The run directory, shared by all nodes: gate.json, checkpoints/.")
@click.option("--data", required=True, help="Directory of the packed blocks on this node.")
@click.option("--world", type=click.IntRange(1), envvar=WORLD_VARIABLES, required=True, help="Ranks of the job.")
@click.option("--ranks", type=RanksOption(), help="Those of this process, as 0-7; else the launcher's RANK, else all.")
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
@click.option("--node", envvar=NODE_NAME_VARIABLES, help="Name of this node in what is said. [default: its host name]")
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
        more = gate_settings_from_job(job)
        if ranks is None and not any(os.environ.get(name) for name in RANK_VARIABLES):
            ranks = ranks_on_node(job, node_name(node))
    ranks = select_ranks(world, ranks)
    size = None if checkpoint_gigabytes is None else round(checkpoint_gigabytes * 1e9)
    settings = GateSettings(world, micro_batch, accumulation, keep, seq_len, vocab_size, size, **more)
    here = GateProcess(node_name(node), ranks, data, run, model, resume, config, path_deadline)
    meeting = None if ranks == tuple(range(world)) else parse_rendezvous(rendezvous)
    gate = run_gate(settings, here, meeting, wait)
    code = gate.verdict.exit_code(strict)
    if as_json:
        click.echo(json.dumps(gate.record, indent=1))
    elif 0 in ranks or len(gate.reports) == 1:
        click.echo("\n".join(gate.verdict.lines()))
        click.echo(gate_summary_line(gate.verdict.level, code, gate.record["gate_id"], gate.record["seconds"]))
    else:
        click.echo(f"gate {gate.verdict.level}: rank 0's process on {gate.reports[0].node} says why")
    if gate.unrecorded:
        click.echo(f"{run}/gate.json is not written: {gate.unrecorded}", err=True)
        code = 2
    sys.exit(code)


def gate_summary_line(level: str, code: int, gate_id: str, seconds: float | None) -> str:
    took = "" if seconds is None else f" in {seconds:.2f} s"
    word = "refused" if code == 2 else "open"
    return f"gate {word}: {level}{took}{', id ' + gate_id if gate_id else ''}"


def parse_rendezvous(given: str | None) -> Rendezvous:
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
        raise UserError(f"rendezvous {given!r}: expected HOST:PORT")
    key = next((os.environ[name] for name in JOB_ID_VARIABLES if os.environ.get(name)), "")
    return Rendezvous(host, int(port), key)


# `wattwatch-train launch`: a job over its nodes, from the gate to the last checkpoint.


def print_keys(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Every key with its default and what it means, as a file to start from."""
    if wanted:
        click.echo(settings_help(), nl=False)
        ctx.exit()


@click.command()
@click.argument("job", metavar="JOB.toml")
@click.option("--smoke", type=click.Choice(["boundary"]), help="Only the last two steps and the save after them.")
@click.option("--fresh", is_flag=True, help="From the start: checkpoints that are there are set aside.")
@click.option("--print", "only_print", is_flag=True, help="Print what would be run, run nothing.")
@click.option(
    "--keys", is_flag=True, is_eager=True, expose_value=False, callback=print_keys, help="Print all keys of JOB.toml."
)
def launch_command(job: str, smoke: str | None, fresh: bool, only_print: bool) -> None:
    """Runs the job on all its nodes: gate, then ranks, and again from the last complete checkpoint when they fail.

    SIGTERM or Ctrl-C once: the ranks save and end. Twice: they are ended. Exit code: 0 all steps are done and saved,
    2 refused, 4 stopped on request, 5 failed after all attempts, 130 interrupted.
    """
    settings = with_absolute_path(read_job_file(job))
    wishes = LaunchOptions(smoke, fresh)
    if smoke:
        settings = smoke_test_job(settings)
    if only_print:
        click.echo("\n".join(plan_lines(settings, wishes)))
        return
    with count_interrupts() as counted:
        sys.exit(JobLauncher(settings, wishes, counted, click.echo).run())


def with_absolute_path(job: JobFile) -> JobFile:
    """The same path on every node, whatever directory a login starts in."""
    return replace(job, path=str(Path(job.path).absolute()))


# The command `wattwatch-train`: a table of commands, each loaded when it is called, so that the gate stays quick.

# name -> (module, object, one line of help)
COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "pack": ("wattwatch.trainer.cli", "pack_command", "Tokenise records once, into fixed blocks per rank."),
    "gate": ("wattwatch.trainer.cli", "gate_command", "Six checks over all ranks: may this job start?"),
    "launch": ("wattwatch.trainer.cli", "launch_command", "A job over its nodes, from gate to last checkpoint."),
    "run": ("wattwatch.trainer.train.rank", "run_command", "One rank of a job; the launcher starts it."),
}


class TrainCommandGroup(click.Group):
    """A group that imports a command's module only when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=TrainCommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wattwatch", prog_name="wattwatch-train", message="%(prog)s %(version)s")
def wattwatch_train() -> None:
    """Full fine-tuning whose ranks cannot run out of step: what it reads is packed, and checked before it starts."""


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit codes: 0 OK, 1 warning, 2 refused or wrong use, 3 unknown, 130 interrupted.

    A traceback is for developers: set WATTWATCH_DEBUG=1 to see it.
    """
    try:
        code = wattwatch_train.main(args=arguments, prog_name="wattwatch-train", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except click.ClickException as error:
        error.show()
        return sys.exit(error.exit_code)
    except UserError as error:
        return _fail(str(error), 2)
    except ModuleNotFoundError as error:
        if error.name not in ("datasets", "transformers", "tokenizers", "numpy", "safetensors", "torch"):
            raise
        return _fail(f"{error.name} is not installed: pip install 'wattwatch[trainer]'", 2)
    except Exception as error:
        if os.environ.get("WATTWATCH_DEBUG") == "1":
            raise
        return _fail(
            f"wattwatch-train: an internal error, please report it: {type(error).__name__}: {error}\n"
            "Run again with WATTWATCH_DEBUG=1 for the place in the code.",
            3,
        )
    return sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> Any:
    click.echo(message, err=True)
    return sys.exit(code)


if __name__ == "__main__":
    main()
