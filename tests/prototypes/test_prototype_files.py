import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from hf_sphere.prototypes import Placement, place_prototypes


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prototypes.safetensors"


def test_round_trip_preserves_everything_with_metadata_in_json(file):
    placed = place_prototypes(
        5, 3, class_vectors=torch.randn(5, 4), ordering="assignment", class_names=["a", "b", "c", "7", "é"]
    )
    placed.save(file)
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["placement"])
    assert (facts["optimal"], facts["class_names"]) == (placed.optimal, ["a", "b", "c", "7", "é"])
    loaded = Placement.load(file)
    assert loaded.class_names == ("a", "b", "c", "7", "é")
    torch.testing.assert_close(loaded.prototypes, placed.prototypes, rtol=0, atol=1e-15)
    assert loaded.separation == pytest.approx(placed.separation, abs=1e-15)
    for name in ("bound", "optimal", "method", "seconds", "order", "class_names"):
        assert getattr(loaded, name) == getattr(placed, name), name


def test_saving_creates_the_folder_replaces_a_file_and_writes_no_other(tmp_path):
    file = tmp_path / "new" / "folder" / "three.safetensors"
    place_prototypes(3, 2).save(file)
    points = torch.eye(4, dtype=torch.float64)[:, :3].T.contiguous().T[:3]  # a view
    Placement(points, separation=0.0, bound=-0.5, method="by hand", seconds=1.5).save(str(file))
    loaded = Placement.load(str(file))
    assert (loaded.method, loaded.seconds) == ("by hand", 1.5)
    assert torch.equal(loaded.prototypes, torch.eye(3, dtype=torch.float64))
    assert [path.name for path in file.parent.iterdir()] == ["three.safetensors"]


def test_separation_and_bound_are_recomputed(file):
    Placement(torch.eye(3, dtype=torch.float64), separation=-9.0, bound=-9.0, method="lie", seconds=0.0).save(file)
    loaded = Placement.load(file)
    assert (loaded.separation, loaded.bound, loaded.optimal) == (0.0, -0.5, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("scale", [3, 1e-300, 1e300])
def test_bare_tensor_of_any_dtype_is_normalized(file, dtype, scale):
    scale = scale if dtype == torch.float64 else 3
    save_file({"prototypes": (scale * torch.eye(4, 3, dtype=torch.float64) + scale).to(dtype)}, file)
    loaded = Placement.load(file)
    assert (loaded.prototypes.dtype, loaded.method) == (torch.float64, "unknown")
    torch.testing.assert_close(loaded.prototypes.norm(dim=1), torch.ones(4, dtype=torch.float64))
    save_file({"prototypes": torch.eye(3)}, file, {"placement": '{"class_names": ["a", "b"]}'})
    with pytest.raises(ValueError, match="2 class names for 3 prototypes"):
        Placement.load(file)


MATRIX = r"must be finite and non-zero, \(K, d\) with K and d at least 2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no safetensors at all", "header"),
        ({"weights": torch.eye(3)}, "does not contain tensor prototypes"),
        *(({"prototypes": torch.ones(shape)}, MATRIX) for shape in [(3,), (2, 3, 4), (1, 3), (3, 1)]),
        *(({"prototypes": torch.full((3, 3), float(value))}, MATRIX) for value in ("nan", "inf")),
        ({"prototypes": torch.eye(4, 3)}, MATRIX),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_without_valid_prototypes_is_rejected(file, content, message):
    file.write_bytes(content if isinstance(content, bytes) else save(content))
    with pytest.raises((ValueError, SafetensorError), match=message):
        Placement.load(file)
