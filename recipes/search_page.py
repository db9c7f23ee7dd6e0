"""The same as `hf-sphere page`."""

from hf_sphere.commands.command_line import run_job
from hf_sphere.commands.page import main

__all__ = ["main"]

if __name__ == "__main__":
    run_job("page")
