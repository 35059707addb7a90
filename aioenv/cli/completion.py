"""Print a script with which a shell completes the commands and options of aioenv.

In ~/.bashrc: eval "$(aioenv completion bash)". In ~/.zshrc, after compinit: eval "$(aioenv completion zsh)". For fish:
aioenv completion fish > ~/.config/fish/completions/aioenv.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from shlex import quote

__all__ = ["HELP", "add_arguments", "run"]

HELP = "print a script for completion in bash, zsh or fish"

# zsh runs it, too. An option whose value is none of a few words, and what follows no option, is completed as a file.
_BASH = """\
_aioenv() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=
  if [ "$COMP_CWORD" = 1 ]; then
    words={commands}
  else
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _aioenv aioenv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell completes")


def run(args: argparse.Namespace) -> int:
    """Print the script; 0."""
    commands: Mapping[str, argparse.ArgumentParser] = args.commands
    if args.shell == "fish":
        print(_fish(commands, args.helps), end="")
    else:
        print("autoload -U +X bashcompinit && bashcompinit\n" * (args.shell == "zsh") + _bash(commands), end="")
    return 0


def _bash(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    cases = []
    for name, parser in commands.items():
        words: list[str] = []
        for action in parser._actions:
            words += action.option_strings or action.choices or ()
            if action.option_strings and action.nargs != 0:
                patterns = "|".join(quote(f"{name} {option}") for option in action.option_strings)
                cases.append(f"    {patterns}) {f'words={_joined(action.choices)} ' if action.choices else ''};;")
        cases.append(f"    {quote(name)}' '*) words={_joined(words)} ;;")
    return _BASH.format(commands=_joined(commands), cases="\n".join(cases))


def _joined(words: Iterable[str]) -> str:
    return quote(" ".join(words))


def _fish(commands: Mapping[str, argparse.ArgumentParser], helps: Mapping[str, str]) -> str:
    lines = [f"-f -n __fish_use_subcommand -a {name} -d {quote(helps[name])}" for name in commands]
    for name, parser in commands.items():
        for action in parser._actions:
            if not (action.option_strings or action.choices):
                continue  # a file, or anything
            line = f"-n '__fish_seen_subcommand_from {name}'"
            for option in action.option_strings:
                line += f" -l {option[2:]}" if option.startswith("--") else f" -s {option[1:]}"
            if action.choices:
                line += f" {'-x' if action.option_strings else '-f'} -a {_joined(action.choices)}"
            elif action.option_strings and action.nargs != 0:
                line += " -r"
            lines.append(f"{line} -d {quote(action.help or '')}")
    return "".join(f"complete -c aioenv {line}\n" for line in lines)
