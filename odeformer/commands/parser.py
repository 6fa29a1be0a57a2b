"""How a sub-command reads its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

DEVICE = "cpu, cuda, ...; auto: a GPU where there is one"


class Parser(argparse.ArgumentParser):
    """Guesses what an unknown option meant; ``more``: further options, with a dot in their names."""

    more: Callable[[], Sequence[str]] = staticmethod(tuple)

    def error(self, message: str) -> Any:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        if message.startswith("unrecognized") and unknown.startswith("--"):
            short = {name.rpartition(".")[2].replace("_", "-"): name for name in self.more()}
            known = {name[2:]: name for name in self._option_string_actions if name.startswith("--")}
            near = get_close_matches(unknown[2:], [*short, *known], 1)
            message += f" (did you mean {(short | known)[near[0]]}?)" if near else ""
        super().error(message)


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, but not "(default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def make_parser(name: str, command: Any) -> argparse.ArgumentParser:
    """The parser of a sub-command."""
    parser = Parser(prog=f"odeformer {name}", description=command.HELP[0].upper() + command.HELP[1:] + ".",
                    formatter_class=Help, allow_abbrev=False)
    command.arguments(parser)
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments, and beside them the settings given as --table.key VALUE. Help is given without torch."""
    if {"-h", "--help"} & {*argv}:
        parser.parse_args(argv)
    from odeformer import settings

    rest, options = settings.dotted(argv)
    return parser.parse_args(rest), options
