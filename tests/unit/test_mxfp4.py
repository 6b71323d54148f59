"""The MXFP4 codec against the format's definition and transformers' own decoder."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from modeling_latentmoe.mxfp4 import decode, encode

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_bytes(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def slow_decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One value at a time, in float64."""
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            byte = int(packed[row, column // 2])
            nibble = byte & 15 if column % 2 == 0 else byte >> 4
            value = E2M1[nibble & 7] * (-1.0 if nibble & 8 else 1.0)
            out[row, column] = value * 2.0 ** (int(scale[row, column // 32]) - 127)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decode_is_the_definition(dtype):
    packed, scale = random_bytes(8, 64), random_bytes(8, 4, seed=1, low=100, high=150)
    expected = slow_decode(packed, scale)
    decoded = decode(packed, scale, dtype)
    assert decoded.dtype == dtype
    # Two significant bits: exact in every one of these dtypes, the sign of zero included.
    assert torch.equal(decoded.double(), expected)
    assert torch.equal(decoded.signbit(), expected.signbit())


def test_decode_every_byte_as_transformers_does():
    packed = torch.arange(256, dtype=torch.uint8).repeat(4, 1).view(1, 4, 16, 16)
    scale = random_bytes(1, 4, 16, seed=2, low=110, high=140)
    # The in-tree decoder returns [experts, in, out].
    theirs = convert_moe_packed_tensors(packed, scale, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(decode(packed.flatten(2), scale, torch.float32), theirs)


def test_smallest_and_largest_scales():
    packed = torch.full((1, 16), 0x71, dtype=torch.uint8)  # 0.5 and 6
    scales = {
        s: decode(packed, torch.tensor([[s]], dtype=torch.uint8), torch.float64)[0, :2].tolist() for s in (0, 254)
    }
    assert scales[0] == [2.0**-128, 6 * 2.0**-127]
    assert scales[254] == [2.0**126, 6 * 2.0**127]
    low = decode(packed, torch.zeros(1, 1, dtype=torch.uint8), torch.float32)[0, :2]
    assert low.tolist() == [2.0**-128, 6 * 2.0**-127]
    # 6 * 2^127 is beyond float32 and bfloat16.
    high = decode(packed, torch.full((1, 1), 254, dtype=torch.uint8), torch.bfloat16)[0, :2]
    assert high.tolist() == [2.0**126, float("inf")]


def test_scale_255_is_nan():
    scale = torch.tensor([[127, 255]], dtype=torch.uint8)
    decoded = decode(torch.zeros(1, 32, dtype=torch.uint8), scale, torch.float32)
    assert not decoded[0, :32].isnan().any()
    assert decoded[0, 32:].isnan().all()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (0.26, 0.5),
        (4.99, 4.0),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_encode_rounds_half_to_even(value, expected, sign):
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 1] = 6.0, sign * value
    packed, scale = encode(weight)
    assert scale.item() == 127
    assert decode(packed, scale, torch.float32)[0, :2].tolist() == [6.0, sign * expected]


def test_encode_rounds_to_the_nearest_of_all_values():
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    packed, scale = encode(weight)
    grid = torch.tensor([s * v for s in (1, -1) for v in E2M1], dtype=torch.float64) * 2.0 ** (scale.double() - 127)
    distance = (weight.unsqueeze(-1) - grid.unsqueeze(1)).abs().amin(-1)
    assert torch.equal((decode(packed, scale, torch.float64) - weight).abs(), distance)


@pytest.mark.parametrize("exponent", [-100, -3, 0, 60])
@pytest.mark.parametrize("largest", [6.0, 6.0001, 3.0, 3.0001, 5.0, 7.9])
def test_encode_never_clips_and_uses_the_smallest_scale(largest, exponent):
    weight = torch.full((1, 32), largest / 10) * 2.0**exponent
    weight[0, 5] = largest * 2.0**exponent
    packed, scale = encode(weight)
    multiplier = 2.0 ** (scale.item() - 127)
    assert weight.abs().max() <= 6 * multiplier
    assert weight.abs().max() > 3 * multiplier
    error = (decode(packed, scale, torch.float32) - weight).abs().max() / weight.abs().max()
    assert error <= 1 / 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_encode_reproduces_decoded_weights(dtype):
    packed, scale = random_bytes(3, 40, 48, seed=4), random_bytes(3, 40, 3, seed=5, low=110, high=140)
    decoded = decode(packed, scale, dtype)
    again = decode(*encode(decoded), dtype)
    assert torch.equal(again, decoded)
    assert torch.equal(again.signbit(), decoded.signbit())


def test_encode_reproduces_the_smallest_scales():
    packed, scale = random_bytes(4, 16, seed=6), torch.tensor([[0], [1], [2], [3]], dtype=torch.uint8)
    decoded = decode(packed, scale, torch.float32)
    assert torch.equal(decode(*encode(decoded), torch.float32), decoded)


def test_zero_groups():
    packed, scale = encode(torch.tensor([[0.0, -0.0] * 16]))
    assert scale.item() == 127
    assert (packed == 0x80).all()
    assert decode(packed, scale, torch.float32).eq(0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_encode_refuses_what_it_cannot_store(bad):
    weight = torch.ones(2, 32)
    weight[1, 7] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        encode(weight)


def test_encode_refuses_magnitudes_beyond_the_format():
    with pytest.raises(ValueError, match="beyond"):
        encode(torch.full((1, 32), 2.0**131, dtype=torch.float64))


def test_widths_must_be_whole_groups():
    with pytest.raises(ValueError, match="32 columns"):
        encode(torch.ones(2, 48))
    with pytest.raises(ValueError, match="do not fit"):
        decode(torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        decode(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match="uint8"):
        decode(torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32)
