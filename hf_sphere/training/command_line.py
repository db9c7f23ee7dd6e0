"""What every recipe's script ends with: `run_recipe(main)`. Imports nothing heavy."""

import os
import sys
from collections.abc import Callable, Sequence

from huggingface_hub.errors import StrictDataclassError

from hf_sphere.training.errors import CheckpointError, TrainingDivergedError, TrainingInterruptedError


def run_recipe(main: Callable[[Sequence[str] | None], None]) -> None:
    """Call a recipe's `main`; errors that its user can fix become one readable line and an exit status."""
    try:
        main(None)
    except TrainingInterruptedError as stop:
        from accelerate import PartialState

        if PartialState().is_main_process:
            print(f"\n{str(stop)[:1].upper()}{str(stop)[1:]}", file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("\nStopped at once; the last checkpoint is complete.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError, StrictDataclassError, TrainingDivergedError, CheckpointError) as error:
        if os.environ.get("HF_SPHERE_TRACEBACK"):
            raise
        print(f"\nError: {error}\n(Set HF_SPHERE_TRACEBACK=1 for the traceback.)", file=sys.stderr)
        sys.exit(1)
