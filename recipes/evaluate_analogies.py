"""The same as `hf-sphere analogies`."""

from hf_sphere.commands.analogies import main
from hf_sphere.commands.command_line import run_job

__all__ = ["main"]

if __name__ == "__main__":
    run_job("analogies")
