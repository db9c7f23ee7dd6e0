"""The same as `hf-sphere projections`."""

from hf_sphere.commands.command_line import run_job
from hf_sphere.commands.projections import main

__all__ = ["main"]

if __name__ == "__main__":
    run_job("projections")
