"""The command `hf-sphere`."""

import difflib
import sys
from collections.abc import Sequence

from hf_sphere.commands import JOBS
from hf_sphere.utils.commands import COMMANDS


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job that the first argument names, with the others."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        from hf_sphere.commands.command_line import run_job, run_main
    except KeyboardInterrupt:
        sys.exit(130)
    if name in ("-h", "--help", "help"):
        lines = ["Learning on the hypersphere. Usage: hf-sphere JOB [options]"]  # 24 lines in all, a small terminal
        lines += [f"  {name:<13}{summary}" for name, summary in JOBS.items()]
        lines += ["", "hf-sphere JOB --help shows the options of a job, hf-sphere --version the version."]
        run_main(lambda _: print("\n".join(lines)))
    elif name == "--version":
        from hf_sphere import __version__

        print(f"hf_sphere {__version__}")
    elif name in JOBS:
        run_job(name, words)
    else:
        nearest = difflib.get_close_matches(name, [*JOBS, *COMMANDS.values()], 1, 0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "run hf-sphere to see the jobs."
        hint = "options follow the job." if name.startswith("-") else hint
        sys.exit(f"hf-sphere: there is no job {name!r}; {hint}")


if __name__ == "__main__":
    main()
