"""The command line `wattwatch-train`: pack, gate, launch, and run, which the launcher starts once per GPU.

Each command imports what it needs when it is called: `gate` has to start in milliseconds on every node, and torch,
datasets and rich take seconds to import.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count
from wattwatch.trainer.ranks import RANK_VARIABLES, WORLD_VARIABLES, RanksOption, select_ranks

if TYPE_CHECKING:
    from wattwatch.trainer.gate.gather import Rendezvous
    from wattwatch.trainer.launch.placement import Placement
    from wattwatch.trainer.pack.manifest import PackManifest
    from wattwatch.trainer.settings import JobFile

# The launcher's own name for the node first: it is the one that the job file uses.
NODE_NAME_VARIABLES: Final = ("WATTWATCH_NODE", "SLURMD_NODENAME")
JOB_ID_VARIABLES: Final = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
OPTIONAL_PACKAGES: Final = ("datasets", "transformers", "tokenizers", "numpy", "safetensors", "torch")


class PipelineGroup(click.Group):
    """Lists the commands in the order in which they are used, not in alphabetical order."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=PipelineGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wattwatch", prog_name="wattwatch-train", message="%(prog)s %(version)s")
def wattwatch_train() -> None:
    """Full fine-tuning. Data is packed and checked first, so that all ranks always issue the same collectives."""


@wattwatch_train.command("pack", short_help="Tokenize a dataset into blocks of fixed length for each rank.")
@click.argument("source")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Output directory, on the local disk of the node.",
)
@click.option(
    "--tokenizer", required=True, help="Directory written by save_pretrained, or a name on the Hugging Face Hub."
)
@click.option(
    "--world", type=click.IntRange(1), envvar=WORLD_VARIABLES, required=True, help="Number of ranks of the job."
)
@click.option(
    "--ranks",
    type=RanksOption(),
    help="Ranks on this node, such as 0-7. [default: the rank set by the launcher, or all ranks]",
)
@click.option("--seq-len", type=click.IntRange(2), default=2048, show_default=True, help="Token ids per block.")
@click.option("--split", default="train", show_default=True, help="Split of the dataset to read.")
@click.option(
    "--column",
    help="Column that holds the text or the lists of messages. [default: the column text or, if there is none, the "
    "column messages]",
)
@click.option(
    "--contiguous/--strided",
    default=True,
    show_default=True,
    help="Contiguous: each rank gets one range of consecutive rows. Strided: each rank gets every Nth row.",
)
@click.option(
    "--document-mask",
    is_flag=True,
    help="Also write the positions where records begin. A job with train.document_mask needs them.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes that tokenize. [default: one per CPU core]"
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON list with the manifest of each packed rank, instead of text."
)
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
    """Tokenize each record of SOURCE once and pack the ids into blocks of fixed length.

    SOURCE is JSONL (a path or a glob), a directory written by save_to_disk of datasets, or the name of a dataset. Each
    rank gets an .i32 file and a manifest. The same input always gives the same bytes. Exit code 2 means an error; if
    the message gives a rank, nothing was written for that rank.
    """
    ranks = select_ranks(world, ranks)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from wattwatch.trainer.pack.corpus import read_corpus, shard_corpus
    from wattwatch.trainer.pack.packing import PackSettings, pack_shard
    from wattwatch.trainer.pack.tokens import TokenizerPool, read_tokenizer

    corpus = read_corpus(source, split, column)
    recipe, identity = read_tokenizer(tokenizer, corpus.kind)
    settings = PackSettings(seq_len, document_mask)
    pool = TokenizerPool(recipe, workers or len(os.sched_getaffinity(0)))
    shards = [shard_corpus(corpus, world, rank, contiguous) for rank in ranks]
    manifests: list[PackManifest] = []
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with pool, Progress(*bar, console=Console(stderr=True)) as progress:
        for shard in shards:
            task = progress.add_task(f"rank {shard.rank}", total=shard.row_ids.size)
            manifest = pack_shard(corpus, shard, settings, identity, pool, output, partial(progress.advance, task))
            manifests.append(manifest)
            if not as_json:
                click.echo(describe_manifest(manifest))
    if as_json:
        click.echo(json.dumps([asdict(manifest) for manifest in manifests], indent=1))


def describe_manifest(manifest: PackManifest) -> str:
    return (
        f"rank {manifest.rank} of {manifest.world}: {format_count(manifest.rows, 'row')} ({manifest.empty_rows:,} "
        "empty), "
        f"{format_count(manifest.tokens, 'token')}, {format_count(manifest.blocks, 'block')} of "
        f"{format_count(manifest.seq_len, 'token')}, "
        f"{format_count(manifest.dropped_tokens, 'token')} dropped"
    )


def read_job_defaults(ctx: click.Context, _: click.Parameter, path: str | None) -> JobFile | None:
    """Callback of `gate --job`: the values of the job file become the defaults of the other options."""
    if path is None:
        return None
    from wattwatch.trainer.settings import read_job_file

    job = read_job_file(path)
    ctx.default_map = gate_option_defaults(job)
    return job


@wattwatch_train.command("gate", short_help="Run six checks over all ranks before a job starts.")
@click.option(
    "--job",
    is_eager=True,
    callback=read_job_defaults,
    help="Job file (JOB.toml) that sets the defaults of the options below.",
)
@click.option("--run", required=True, help="Run directory, shared by all nodes; holds gate.json and checkpoints/.")
@click.option("--data", required=True, help="Directory of the packed blocks on this node.")
@click.option(
    "--world", type=click.IntRange(1), envvar=WORLD_VARIABLES, required=True, help="Number of ranks of the job."
)
@click.option(
    "--ranks",
    type=RanksOption(),
    help="Ranks that this process checks, such as 0-7. [default: the rank set by the launcher, or all ranks]",
)
@click.option(
    "--rendezvous", help="HOST:PORT where rank 0's gate process listens. [default: MASTER_ADDR and MASTER_PORT]"
)
@click.option(
    "--micro-batch", type=click.IntRange(1), default=1, show_default=True, help="Blocks per micro-step, on each rank."
)
@click.option(
    "--accumulation", type=click.IntRange(1), default=8, show_default=True, help="Micro-steps per optimizer step."
)
@click.option("--seq-len", type=click.IntRange(2), help="Token ids per block. [default: as packed]")
@click.option(
    "--vocab-size",
    type=click.IntRange(1),
    help="Vocabulary size of the model. [default: from --model, or from the tokenizer]",
)
@click.option(
    "--model", help="Model directory. The gate reads the vocabulary, the tokenizer and the checkpoint size from it."
)
@click.option("--config", help="Configuration file of the job; it must be identical on all nodes.")
@click.option("--resume", help="Checkpoint directory to resume from; it must be complete.")
@click.option(
    "--keep", type=click.IntRange(1), default=2, show_default=True, help="Number of checkpoints to keep on disk."
)
@click.option(
    "--checkpoint-gigabytes",
    type=click.FloatRange(0, min_open=True),
    help="Size of one checkpoint in GB. [default: computed from the model]",
)
@click.option("--node", envvar=NODE_NAME_VARIABLES, help="Name of this node in messages. [default: its host name]")
@click.option(
    "--wait", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to wait for all ranks."
)
@click.option(
    "--path-deadline",
    type=click.FloatRange(0.1),
    default=10.0,
    show_default=True,
    help="Seconds to wait for an answer from a file system or from nvidia-smi.",
)
@click.option("--strict", is_flag=True, help="Refuse the job on warnings too, not only on failures.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as JSON with the keys of gate.json, instead of text. Every gate process prints it.",
)
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
    """Run six checks over all ranks before a job starts: world, blocks, shards, evenness, checkpoint, devices.

    Start it on all nodes at the same time, one process per node or one per rank. The process with rank 0 prints the
    verdict and writes RUN/gate.json. Exit code: 0 passed, 1 warnings, 2 refused, 3 internal error.
    """
    from wattwatch.trainer.gate.model import GateSettings
    from wattwatch.trainer.gate.run import GateProcess, node_name, run_gate

    more: dict[str, Any] = {}
    if job:
        more = gate_settings_from_job(job)
        if ranks is None and not any(os.environ.get(name) for name in RANK_VARIABLES):
            ranks = ranks_on_node(job, node_name(node))
    ranks = select_ranks(world, ranks)
    checkpoint_bytes = None if checkpoint_gigabytes is None else round(checkpoint_gigabytes * 1e9)
    settings = GateSettings(world, micro_batch, accumulation, keep, seq_len, vocab_size, checkpoint_bytes, **more)
    process = GateProcess(node_name(node), ranks, data, run, model, resume, config, path_deadline)
    meeting_point = None if ranks == tuple(range(world)) else parse_rendezvous(rendezvous)
    gate = run_gate(settings, process, meeting_point, wait)
    code = gate.verdict.exit_code(strict)
    if as_json:
        click.echo(json.dumps(gate.record, indent=1))
    elif 0 in ranks or len(gate.reports) == 1:
        click.echo("\n".join(gate.verdict.lines()))
        click.echo(gate_summary_line(gate.verdict.level, code, gate.record["gate_id"], gate.record["seconds"]))
    else:
        click.echo(f"gate {gate.verdict.level}: see the output of rank 0's process on {gate.reports[0].node}")
    if gate.unrecorded:
        click.echo(f"{run}/gate.json was not written: {gate.unrecorded}", err=True)
        code = 2
    sys.exit(code)


def gate_option_defaults(job: JobFile) -> dict[str, Any]:
    """Values for the options of `gate`, by parameter name, so that it checks exactly the job that will be launched.

    Raises UserError if the launcher's environment says that the job has another number of ranks.
    """
    from wattwatch.trainer.launch.placement import format_address, resolve_placement

    settings, placement = job.settings, resolve_placement(job.settings.launch, os.environ)
    for name in WORLD_VARIABLES:
        if os.environ.get(name, str(placement.world)) != str(placement.world):
            raise UserError(
                f"{job.path}: the job has {len(placement.nodes)} x {placement.ranks_per_node} = {placement.world} "
                f"ranks (nodes x ranks per node), but the environment has {name}={os.environ[name]}; correct "
                "launch.nodes or launch.ranks_per_node"
            )
    return {
        "run": settings.run,
        "data": settings.data,
        "model": settings.model,
        "config": job.path,
        "world": placement.world,
        "rendezvous": format_address(placement.address, placement.port + 1),  # torch's store uses the port itself
        "micro_batch": settings.train.micro_batch,
        "accumulation": settings.train.accumulation,
        "keep": settings.checkpoint.keep,
        "wait": settings.launch.gate_wait_seconds,
        "strict": settings.launch.strict,
    }


def gate_settings_from_job(job: JobFile) -> dict[str, Any]:
    """Fields of GateSettings that have no option."""
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
    """The ranks that the job file places on `node`. Raises UserError if it does not name that node."""
    from wattwatch.trainer.launch.placement import resolve_placement

    placement = resolve_placement(job.settings.launch, os.environ)
    if len(placement.nodes) == 1:
        return tuple(placement.ranks(0))
    return tuple(placement.ranks(_node_index(placement, node, job.path)))


def _node_index(placement: Placement, node: str, path: str) -> int:
    for name in (node, node.partition(".")[0]):  # a host name may be fully qualified, the job file's names are not
        if name in placement.nodes:
            return placement.nodes.index(name)
    shown = ", ".join(placement.nodes[:4]) + (", ..." if len(placement.nodes) > 4 else "")
    raise UserError(
        f"{path}: this node, {node}, is not in launch.nodes ({shown}); give its name with --node, or its ranks with "
        "--ranks"
    )


def gate_summary_line(level: str, code: int, gate_id: str, seconds: float | None) -> str:
    """`gate passed: WARN in 0.41 s, id 3f2a`, `gate refused: FAIL in 0.38 s, id 77c0`."""
    took = "" if seconds is None else f" in {seconds:.2f} s"
    state = "refused" if code == 2 else "passed"
    return f"gate {state}: {level}{took}{', id ' + gate_id if gate_id else ''}"


def parse_rendezvous(given: str | None) -> Rendezvous:
    """`given` is HOST:PORT; None means the launcher's MASTER_ADDR and MASTER_PORT.

    Raises click.UsageError if neither is set, UserError if it is not HOST:PORT.
    """
    from wattwatch.trainer.gate.gather import Rendezvous

    if given is None:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not host or not port:
            raise click.UsageError(
                "this process has only some ranks of the job: set the address of rank 0's process with --rendezvous "
                "HOST:PORT"
            )
        given = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    host, _, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"rendezvous {given!r}: expected HOST:PORT")
    key = next((os.environ[name] for name in JOB_ID_VARIABLES if os.environ.get(name)), "")
    return Rendezvous(host, int(port), key)


def print_keys(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Callback of `launch --keys`."""
    if wanted:
        from wattwatch.trainer.settings import settings_help

        click.echo(settings_help(), nl=False)
        ctx.exit()


@wattwatch_train.command("launch", short_help="Run a job on all its nodes, from the gate to the last checkpoint.")
@click.argument("job", metavar="JOB.toml")
@click.option("--smoke", type=click.Choice(["boundary"]), help="Run only the last two steps and the save after them.")
@click.option("--fresh", is_flag=True, help="Move existing checkpoints aside and start from the beginning.")
@click.option("--print", "only_print", is_flag=True, help="Print the commands and their environment, but run nothing.")
@click.option(
    "--keys",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_keys,
    help="Print all keys of JOB.toml with their defaults.",
)
def launch_command(job: str, smoke: str | None, fresh: bool, only_print: bool) -> None:
    """Run a job on all its nodes: first the gate, then the ranks. After a failure, resume from the last checkpoint.

    SIGTERM or Ctrl-C once: the ranks save and stop. Twice: they are terminated without saving. Exit code: 0 all steps
    are done and saved, 2 refused, 4 stopped on request, 5 failed, 130 interrupted.
    """
    from wattwatch.trainer.launch.attempt import count_interrupts
    from wattwatch.trainer.launch.launcher import JobLauncher, LaunchOptions, plan_lines
    from wattwatch.trainer.settings import read_job_file, smoke_test_job

    job_file = with_absolute_path(read_job_file(job))
    options = LaunchOptions(smoke, fresh)
    if smoke:
        job_file = smoke_test_job(job_file)
    if only_print:
        click.echo("\n".join(plan_lines(job_file, options)))
        return
    with count_interrupts() as interrupts:
        sys.exit(JobLauncher(job_file, options, interrupts, click.echo).run())


def with_absolute_path(job: JobFile) -> JobFile:
    """The nodes read the file too, and a login over SSH starts in another directory."""
    return replace(job, path=str(Path(job.path).absolute()))


@wattwatch_train.command("run", short_help="Run one rank of a job; the launcher starts this command.")
@click.argument("job")
@click.option("--resume", help="Checkpoint directory to resume from; it must be complete.")
@click.option("--smoke", type=click.Choice(["boundary"]), help="Run only the last two steps and the save after them.")
def run_command(job: str, resume: str | None, smoke: str | None) -> None:
    """Run one rank of the job in the file JOB. The launcher starts this command through torchrun, once per GPU.

    Exit code: 0 all steps are done and saved, 2 refused, 3 internal error, 4 stopped on request before the last step, 5
    failed: a new attempt from the last complete checkpoint may succeed.
    """
    from wattwatch.trainer.train.rank import run_rank_process

    run_rank_process(job, resume, smoke is not None)


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit codes: 0 OK, 1 warning, 2 refused or wrong usage, 3 internal error, 130 interrupted.

    Set WATTWATCH_DEBUG=1 to get the traceback of an internal error.
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
        if error.name not in OPTIONAL_PACKAGES:
            raise
        return _fail(f"{error.name} is not installed: run pip install 'wattwatch[trainer]'", 2)
    except Exception as error:
        if os.environ.get("WATTWATCH_DEBUG") == "1":
            raise
        return _fail(
            f"wattwatch-train: internal error, please report it: {type(error).__name__}: {error}\n"
            "Run again with WATTWATCH_DEBUG=1 for a traceback.",
            3,
        )
    return sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> Any:
    click.echo(message, err=True)
    return sys.exit(code)


if __name__ == "__main__":
    main()
