"""The command line: one module for each group of commands."""

import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from fedskew import torchrun
from fedskew.cli import counts, deploy, labels, new, operate, papers, predict, run, site, sites, sweep, target
from fedskew.cli.page import Console
from fedskew.cli.reference import check, listing, methods
from fedskew.errors import BackendWarning, DataWarning, FedskewError, in_one_line


class _Commands(TyperGroup):
    """The commands; where Ctrl-C stops one that says nothing itself, a word, as Typer would end without one."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            Console(stderr=True, quiet=torchrun.rank() > 0).print("stopped")
            raise typer.Exit(130) from None


app = typer.Typer(
    name="fedskew",
    cls=_Commands,
    help="Federated learning when clients hold different labels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
federation = typer.Typer(
    help="A real federation on Flower: data stays at its sites.", no_args_is_help=True, rich_markup_mode="markdown"
)
_FLOWER: dict[str, Any] = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}


def _add(group: typer.Typer, *commands: Callable[..., None], **settings: Any) -> None:
    for command in commands:
        group.command(**settings)(command)


_add(app, counts.counts, labels.describe, labels.weights, counts.advise, target.target, methods)
_add(app, check)
_add(app, listing, name="list")
_add(app, new.schema, new.new, run.run, sweep.sweep, sweep.arena, papers.recipes, papers.reproduce, run.report)
_add(app, sites.sites, predict.predict, target.adapt, target.personal, predict.watch, papers.demo)
_add(federation, deploy.init, deploy.check, site.site, deploy.local)
_add(federation, operate.superlink, site.supernode, **_FLOWER)
_add(federation, operate.register, operate.revoke, deploy.renew)
_add(federation, operate.run, **_FLOWER)
_add(federation, operate.status, operate.readmit)
app.add_typer(federation, name="deploy")


def _version(wanted: bool) -> None:
    if wanted:
        from fedskew import __version__

        typer.echo(f"fedskew {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
    latex: Annotated[bool, Option("--latex", help="Print tables as LaTeX (booktabs), and all else to stderr.")] = False,
    csv: Annotated[bool, Option("--csv", help="Print tables as CSV, and all else to stderr.")] = False,
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Federated learning when clients hold different labels."""


def _as_note(show: Callable[..., None]) -> Callable[..., None]:
    """Make `warnings.showwarning` print each warning of ours, and Pillow's of large images, once and as one line."""
    shown: set[str] = set()

    def note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, DataWarning | BackendWarning) and category.__module__ != "PIL.Image":
            show(message, category, *place, **more)
        elif str(message) not in shown:
            shown.add(str(message))
            Console(stderr=True, quiet=torchrun.rank() > 0).warn([str(message)])

    return note


def _in_one_line(error: Exception) -> str:
    """Return an error's message; of one that is not of ours also what to do."""
    if isinstance(error, FedskewError):
        return str(error)
    if isinstance(error, OSError | UnicodeEncodeError):
        how = "--debug, before the command, shows where" if isinstance(error, OSError) else "set PYTHONIOENCODING=utf-8"
        return f"can't go on: {in_one_line(error)}; {how}"
    what = "takes more memory than there is" if isinstance(error, MemoryError) else "is nested too deeply to be read"
    return f"what was given {what} ({in_one_line(error)}); --debug, before the command, shows where"


def main() -> None:
    """Run the command line; an error of ours is one line and the exit status that it names. A user's own `module:Class`
    is found in the folder that the command is given in, as with `python -m fedskew`."""
    sys.path.insert(0, "")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores what stops a run
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", DataWarning)
            warnings.simplefilter("always", BackendWarning)
            warnings.showwarning = _as_note(warnings.showwarning)
            app()
    except (FedskewError, MemoryError, RecursionError, OSError, UnicodeEncodeError) as error:
        if "--debug" in sys.argv:
            raise
        Console(stderr=True, quiet=torchrun.rank() > 0).say(f"fedskew: {_in_one_line(error)}", style="red")
        sys.exit(error.exit_code if isinstance(error, FedskewError) else 1)
