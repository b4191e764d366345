"""`fedskew deploy site | supernode`: what a site looks at and agrees to before it joins, and how it joins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from fedskew.cli.page import BOXED, Console, table_of
from fedskew.errors import ConfigError
from fedskew.own_code import away_from_current_folder
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.deploy import Agreement, Look, SiteData, Terms

BAR = 24
_YES_NO = ("none", "yes; they never leave it")
_YES_NO_SUM = ("none", "yes, once")


@away_from_current_folder()
def site(
    check: Annotated[Path | None, Option(help="The site's data.toml: check it, and agree to the app.")] = None,
    report: Annotated[Path | None, Option(help="The site's data.toml: write site-report.html beside it.")] = None,
    agreement: Annotated[
        Path | None,
        Option(
            help="The federation's app folder; default: the app that the server sent last, or the one that came with "
            "the site's folder."
        ),
    ] = None,
    agree: Annotated[
        bool, Option("--agree", help="Agree to what is shown, without being asked; writes agreed.toml.")
    ] = False,
) -> None:
    """Check before a site joins that its data fits the federation, list everything that will leave the site, and agree.

    Looking runs nothing of the app: what only its own code could tell is unknown until you agree, and worked out then.
    What you agree to is written to agreed.toml beside data.toml, with the hash of the app's files. The site refuses
    whatever goes beyond it, whatever the server sends. Do this again when the server changes its app, when the site has
    trained in all rounds that were agreed on, or, with noisy label counts, when the site's data changed.

    After the last round, --report writes a page for the site's own people, and the personal model (personal/): what the
    site has alone, from the common model and from its own one, on its own test samples. Nothing of that is sent. With
    own_models = true in agreed.toml the model alone is trained then.

    Examples:

        fedskew deploy site --check data.toml
        fedskew deploy site --check data.toml --agree
        fedskew deploy site --report data.toml
    """
    from fedskew.deploy import Look, ServerCheck, SiteReport

    place = report or check
    if place is None:
        raise ConfigError("--check, --report: give one of them, with the site's data.toml")
    if not place.is_file():
        what = "is a folder" if place.is_dir() else "there is no such file"
        raise ConfigError(f"{place}: {what}; expected the file data.toml that every site's folder has")
    if report is not None:
        made = SiteReport.write(report, agreement)
        model = "" if made.model is None else f"; fedskew predict {made.model} IMAGES"
        for line in (*made.notes, f"{made.page}{model}"):
            Console().say(line)
        return
    look, console = Look.at(place, agreement), Console(highlight=False)
    data = look.data
    console.warn(ServerCheck.of_site(place))
    if not data.is_unlabelled:
        console.print(_samples(data, look.agreement))
    if data.unlabelled is not None:
        samples = counted(len(data.unlabelled()), "sample")
        others = "; it has no others, and does not train" if data.is_unlabelled else ""
        console.say(f"As the target site this site has {samples} without labels{others}")
    console.print(_leaves(look), _terms(look))
    for line in look.lines():
        console.say(line)
    path = place.with_name("agreed.toml")
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if look.before is not None and look.is_agreed and not agree:
        result = f"this site agreed to this at {look.before.agreed}; --agree renews it, and counts rounds anew"
    elif agree or (asks and typer.confirm(f"Agree{', run its code' if look.needs_code else ''}, and write {path}?")):
        if look.needs_code:
            look = look.run_code()
            console.print(_leaves(look), _terms(look))
        look.accept()
        result = "agreed; the site refuses whatever goes beyond it"
    else:
        result = "nothing is written; if you agree, run this again with --agree"
    console.say(f"{path}: {result}")


def supernode(
    context: typer.Context, data: Annotated[Path, Argument(help="The site's data.toml, with ca.crt and key beside it.")]
) -> None:
    """Join the federation with Flower's flower-supernode, whose further options it takes.

    A site whose clock the server would refuse, or whose key it no longer accepts, gets a line that says so.

    Example:

        fedskew deploy supernode data.toml --port 9094
    """
    from fedskew.deploy import run_supernode

    run_supernode(data, context.args)


def _samples(data: SiteData, agreement: Agreement) -> Table:
    """Return the number of samples of every class, for training (with a bar) and for tests."""
    kind = "token ids" if agreement.tokens else "numbers"
    counts, tests = (found.astype(int).tolist() for found in (data.counts, data.test_counts))
    bars = [Text("█" * -(-BAR * count // max(1, *counts))) if count else Text("none", style="dim") for count in counts]
    title = (
        f"This site's data fits: {counted(len(data.targets), 'sample')} to train on, {len(data.test_targets)} to test; "
        f"{' x '.join(map(str, agreement.shape))} {kind} each"
    )
    rows = zip(agreement.classes, map(str, counts), bars, map(str, tests), strict=True)
    return table_of(["label" if data.multi_label else "class", ">train", "", ">test"], rows, title, **BOXED)


def _leaves(look: Look) -> Table:
    """Return everything that leaves a site (what, when, and how large), with what never does."""
    never = ["samples", "file names", "paths"]
    if look.agreement.label_counts != "exact":
        never.append("exact label counts" if look.agreement.epsilon else "label counts")
    rows = [(one.what, one.when, "unknown" if one.bytes is None else f"{one.bytes:,}") for one in look.leaves]
    found = table_of(["what", "when", ">bytes"], rows, "What will leave this site", show_lines=True, **BOXED)
    found.caption = (
        f"Nothing else leaves it: never {', '.join(never)}. Flower learns the site's address, its key, and when it is "
        "connected. What a model may reveal of the samples that it was trained on: docs/privacy.md of fedskew."
    )
    return found


def _terms(look: Look) -> Group:
    """Return what a site agrees to, and agreed to before where that differs, and code that fedskew did not write."""
    terms, before, code = look.terms, look.before, look.code
    old = terms if before is None else before
    rows: list[tuple[str, object, object]] = [
        ("hash of the app's files", f"{terms.app[:16]}...", f"{old.app[:16]}..."),
        ("version of fedskew", terms.fedskew, old.fedskew),
        ("most rounds", terms.rounds, old.rounds),
        ("models that it trains for itself", _YES_NO[terms.own_models], _YES_NO[old.own_models]),
    ]
    if look.agreement.updates == "masked":
        rows.append(("fewest sites in a sum", terms.sum_sites, old.sum_sites))
        rows.append(("figures of these in a sum", _YES_NO_SUM[terms.own_figures], _YES_NO_SUM[old.own_figures]))
    if terms.updates_epsilon is not None or old.updates_epsilon is not None:
        rows.append(("largest epsilon of its updates together", _epsilon_in_words(terms), _epsilon_in_words(old)))
    if terms.epsilon is not None:
        rows += [
            (f"largest epsilon of a release ({terms.neighbours})", terms.epsilon, old.epsilon),
            (f"largest sum of epsilons ({terms.neighbours})", terms.epsilon_total, old.epsilon_total),
        ]
    same = Text("the same", style="dim")
    cells = [(what, str(limit), same if was == limit else str(was)) for what, limit, was in rows]
    shown = 2 if before is None else 3
    headings = ["what", "limit", "agreed before"][:shown]
    table = table_of(headings, (row[:shown] for row in cells), "What this site agrees to", **BOXED)
    warning = f"CODE THAT IS NOT AS FEDSKEW WRITES IT, and would run at this site: {', '.join(code)}. Read it."
    notes = [*([warning] if code else []), *look.notes()]
    return Group(table, Text(" ".join(notes), style="bold red" if code else "dim"))


def _epsilon_in_words(terms: Terms) -> str:
    if terms.updates_epsilon is None or terms.updates_delta is None:
        return "none: UPDATES WITHOUT NOISE"
    return f"{terms.updates_epsilon:g} (delta {terms.updates_delta:g})"
