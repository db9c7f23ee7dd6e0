"""List the configurations of the papers, or print the settings of one.

hf-sphere configs
hf-sphere configs vmf
hf-sphere configs vmf/mnist-vmf
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments
from hf_sphere.utils.commands import command_of
from hf_sphere.utils.configs import config_names, load_config


@dataclass
class ConfigsArguments(Arguments):
    """What to list."""

    name: str | None = argument(None, "A table, or a configuration to print; can also be passed without --name.")


def main(argv: Sequence[str] | None = None) -> None:
    """List the tables, the configurations of a table, or the settings of a configuration."""
    (args,) = parse_arguments((ConfigsArguments,), named_first("name", argv), __doc__)
    names = config_names()
    tables = sorted({name.partition("/")[0] for name in names})
    if args.name is None:
        for table in tables:
            rows = [name for name in names if name.startswith(f"{table}/")]
            print(f"{table:<15}{len(rows):>4} configurations, such as {rows[0]}")
        print("\nhf-sphere configs TABLE lists a table, hf-sphere configs NAME prints one.")
    elif args.name in tables:
        print("\n".join(name for name in names if name.startswith(f"{args.name}/")))
    else:
        config = load_config(args.name)
        about = {} if config.recipe is None else {"recipe": config.recipe}  # a copy in a file states its job, too
        print(f"# {command_of(config.recipe) if about else 'hf-sphere JOB'} --config {shlex.quote(args.name)}")
        print(yaml.safe_dump({**about, **config.settings}, sort_keys=False), end="")
