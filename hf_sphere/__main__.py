"""The same as `hf-sphere`: `python -m hf_sphere JOB`."""

from hf_sphere.commands.main import main

if __name__ == "__main__":
    main()
