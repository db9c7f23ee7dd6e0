import pytest
import scipy.stats
import torch
from hypothesis import given, strategies as st

from hf_sphere.geometry.sampling import keyed_integers, keyed_normals, keyed_uniforms
from hf_sphere.utils.seeds import GAMMA

MODULUS = 2**64
PUBLISHED = [
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
]  # fmt: skip
"""First numbers of the SplitMix64 generator with state 1234567, as many implementations print them."""


def reference(key: int, place: int) -> int:
    """SplitMix64 in unbounded integers."""
    bits = (key + place) * GAMMA % MODULUS
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % MODULUS
    return bits ^ (bits >> 31)


def signed(number: int) -> int:
    return (number + MODULUS // 2) % MODULUS - MODULUS // 2


def test_numbers_are_those_of_splitmix64():
    key = signed(1234567 * pow(GAMMA, -1, MODULUS))
    found = keyed_integers(torch.tensor(key), torch.arange(1, 6)).tolist()
    assert [number % MODULUS for number in found] == PUBLISHED


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_arithmetic_wraps_around(key, place):
    assert keyed_integers(torch.tensor(key), torch.tensor(place)).item() == signed(reference(key, place))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_the_leading_bits(dtype):
    keys, bits = torch.tensor([-5, 0, 7]), {torch.float32: 24, torch.float64: 53}[dtype]
    leading = [(signed(reference(key, 3)) // 2 ** (64 - bits) + 2 ** (bits - 1)) / 2**bits for key in keys.tolist()]
    assert keyed_uniforms(keys, torch.tensor(3), dtype).tolist() == leading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_are_normal(dtype):
    numbers = keyed_normals(keyed_integers(1, torch.arange(300)), 65, dtype)
    assert (numbers.shape, numbers.dtype) == ((300, 65), dtype)
    assert scipy.stats.kstest(numbers.flatten().double().numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inductor_gives_the_same_numbers(dtype):
    def draw(keys):
        streams = keyed_integers(keys, torch.arange(7)[:, None])
        return keyed_uniforms(streams, torch.arange(5)[:, None, None], dtype), keyed_normals(streams, 9, dtype)

    keys = torch.randint(-(2**63), 2**63 - 1, (12,))
    (uniforms, normals), expected = torch.compile(draw, fullgraph=True)(keys), draw(keys)
    assert torch.equal(uniforms, expected[0])
    torch.testing.assert_close(normals, expected[1])
