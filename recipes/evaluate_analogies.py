"""The same as `hf-sphere analogies`."""

from hf_sphere.commands.command_line import run_job

if __name__ == "__main__":
    run_job("analogies")
