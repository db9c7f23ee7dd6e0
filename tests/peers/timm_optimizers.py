"""timm's tests of optimizers, from its source distribution, run on those that we register with timm.

Tests that name one of timm's own optimizers or parameter-group functions are left out.
"""

import inspect
from typing import Any
from unittest import mock

import pytest

from hf_sphere.optim.optimizers import optimizer_class, optimizer_names

KINDS = {name.replace("_", ""): optimizer_class(name) for name in optimizer_names() if name != "muon"}  # timm has one

with mock.patch("timm.optim.list_optimizers", return_value=list(KINDS)):  # the tests take the names when imported
    from timm_tests import test_optim as peer

# The learning rates that timm has for SGD and for Adam.
peer._CONVERGENCE_CFGS = {
    name: peer._conv(rate, {"lr": rate}) for name in KINDS for rate in [1e-3 if name.startswith("sgd") else 5e-2]
}


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options of an optimizer, which timm reads from the signature; our constructors pass them on to torch's."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return {name: inspect.Parameter(name, kind, default=value) for name, value in KINDS[name].option_defaults().items()}


peer._opt_args = options


def of_ours(test: Any) -> bool:
    """Restrict a test to our optimizers; return whether any is left."""
    marks = getattr(test, "pytestmark", [])
    for index, mark in enumerate(marks):
        if mark.name == "parametrize" and mark.args[0] in ("optimizer", "config"):
            cases = list(KINDS) if test is peer.test_optimizer_convergence else mark.args[1]
            ours = [case for case in cases if (case if isinstance(case, str) else case[0]) in KINDS]
            marks[index] = pytest.mark.parametrize(mark.args[0], ours, **mark.kwargs).mark
            return bool(ours)
    return False


globals().update({name: test for name, test in vars(peer).items() if name.startswith("test_") and of_ours(test)})
# timm's networks have no normalization.
pytestmark = pytest.mark.filterwarnings("ignore:.* no scale-invariant weight", "ignore:no weight of .* has the rule")
