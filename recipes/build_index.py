"""The same as `hf-sphere index`."""

from hf_sphere.commands.command_line import run_job

if __name__ == "__main__":
    run_job("index")
