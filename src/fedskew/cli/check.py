"""`fedskew check`: contract tests of a user's own components."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.console import Console


def check(
    file: Annotated[Path, typer.Argument(help="The Python file that defines them.", show_default=False)],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="CLASS.PARAMETER=VALUE", help="A component's parameter; may be repeated."),
    ] = None,
) -> None:
    """Test your own components, of any slot, before you train with them.

    Every class of the file that has a slot's main function (select, value, step, weigh, combine, update, finish) is
    made, tested in corner cases, trained for three rounds of a tiny federation, repeated and resumed. Takes seconds for
    each. The exit status is 1 if a problem was found.

    Example: fedskew check my_method.py

    Example: fedskew check my_method.py --set Clipped.limit=2.0
    """
    from fedskew import checks
    from fedskew.errors import ConfigError
    from fedskew.trees import parse_change

    found = checks.FoundComponent.in_file(file)
    if not found:
        raise ConfigError(
            f"{file}: defines no component: no class has select, value, step, weigh, combine, update or finish (see "
            "the tutorial 'Add a method of your own')"
        )
    names = {one.kind.__name__ for one in found}
    given: dict[str, dict[str, object]] = {}
    for change in changes or []:
        key, value = parse_change(change)
        name, _, parameter = key.partition(".")
        if name not in names or not parameter:
            raise ConfigError(
                f"--set {change}: expected CLASS.PARAMETER=VALUE with CLASS one of {', '.join(sorted(names))}"
            )
        given.setdefault(name, {})[parameter] = value
    console = Console(soft_wrap=True, highlight=False)
    problems = 0
    for one in found:
        console.print(f"{one.name} ({one.slot})", style="bold", markup=False)
        for test, problem in checks.check(one, given.get(one.kind.__name__, {})):
            problems += problem is not None
            if problem is None:
                console.print(f"  ok      {test}", markup=False)
            else:
                console.print(f"  PROBLEM {test}:\n          {problem}", markup=False, style="red")
    many = f"{len(found)} component{'s' * (len(found) != 1)}"
    console.print(f"{many}: {f'{problems} problem' + 's' * (problems != 1) if problems else 'nothing found'}")
    if problems:
        raise typer.Exit(1)
