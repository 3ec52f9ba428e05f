"""`wattwatch-train launch`: a job over its nodes, from the gate to the last checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from trainer.launch.interruptions import interruptions
from trainer.launch.loop import Launch, Wishes, plan_lines
from trainer.settings import JobFile, read_job, settings_help, smoke_job


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
    settings = absolute(read_job(job))
    wishes = Wishes(smoke, fresh)
    if smoke:
        settings = smoke_job(settings)
    if only_print:
        click.echo("\n".join(plan_lines(settings, wishes)))
        return
    with interruptions() as counted:
        sys.exit(Launch(settings, wishes, counted, click.echo).run())


def absolute(job: JobFile) -> JobFile:
    """The same path on every node, whatever directory a login starts in."""
    return replace(job, path=str(Path(job.path).absolute()))
