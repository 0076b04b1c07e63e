"""Random draws are pure functions of (seed, stream, image index), with the statistics they claim."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from ddpm_ds.ground import keyed
from ddpm_ds.ground.keyed import Draws, Stream

MASK = 0xFFFFFFFF
WORD = st.integers(0, MASK)

# Philox4x32-10 (counter, key, output), from kat_vectors of the Random123 distribution of Salmon et al. 2011. The
# counter and the key of the last one are digits of pi.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)

DRAWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "bits": lambda images, count: bits(3, 1, images, count),
    "uniform": lambda images, count: uniform(3, 1, images, count),
    "normal": lambda images, count: keyed.normal(3, 1, images, count),
    "keep_mask": lambda images, count: keyed.keep_mask(3, 16, images, count, 0.3),
    "integers": lambda images, count: integers(3, 1, images, 1000)[:, None].expand(-1, count),
}


def bits(seed: int, stream: int, images: Tensor, count: int) -> Tensor:
    return Draws(seed, images, {stream: count}).bits(stream)


def uniform(seed: int, stream: int, images: Tensor, count: int) -> Tensor:
    return Draws(seed, images, {stream: count}).uniform(stream)


def integers(seed: int, stream: int, images: Tensor, high: int) -> Tensor:
    return Draws(seed, images, {stream: 1}).integers(stream, high)


def philox_of_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 on Python integers, straight from the paper."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = product_1 >> 32 ^ x1 ^ k0, product_1 & MASK, product_0 >> 32 ^ x3 ^ k1, product_0 & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return x0, x1, x2, x3


def keep_of_integers(seed: int, stream: int, image: int, count: int, drop: float) -> list[bool]:
    key_0, key_1, _, _ = philox_of_integers((0, image & MASK, image >> 32, 0), (seed, stream))
    kept = []
    for element in range(count):
        x = key_0 + element // 2 * 0x9E3779B1 & MASK
        x ^= x >> 16
        x = key_1 + x * 0x85EBCA6B & MASK
        x ^= x >> 13
        x = x * 0xC2B2AE35 & MASK
        x ^= x >> 16
        half = x >> 16 if element % 2 else x & 0xFFFF
        kept.append((half ^ 0x8000) >= round(drop * 65536))  # the sign bit turns unsigned order into signed order
    return kept


def assert_uncorrelated(pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (a, b) in pairs.items():
        correlation = torch.corrcoef(torch.stack((a.flatten().double(), b.flatten().double())))[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(a.numel()), name


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_the_reference_gives_the_known_answers_of_philox(
    counter: tuple[int, ...], key: tuple[int, ...], output: tuple[int, ...]
) -> None:
    assert philox_of_integers(counter, key) == output


@settings(max_examples=50, deadline=None)
@given(seed=WORD, stream=WORD, images=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4))
def test_bits_are_philox_for_every_key_and_counter(seed: int, stream: int, images: list[int]) -> None:
    words = bits(seed, stream, torch.tensor(images), 12)
    for row, image in zip(words.tolist(), images, strict=True):
        blocks = [philox_of_integers((block, image & MASK, image >> 32, 0), (seed, stream)) for block in range(3)]
        assert row == [word for block in blocks for word in block]


@settings(max_examples=25, deadline=None)
@given(seed=WORD, layer=st.integers(0, 500), image=st.integers(0, 2**63 - 1), drop=st.floats(0.0, 0.9999))
def test_keep_mask_is_its_definition_on_unsigned_integers(seed: int, layer: int, image: int, drop: float) -> None:
    stream = Stream.DROPOUT + layer
    mask = keyed.keep_mask(seed, stream, torch.tensor([image]), 33, drop)
    assert mask[0].tolist() == keep_of_integers(seed, stream, image, 33, drop)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_a_draw_does_not_depend_on_the_batch_or_the_count(draw: Callable[[Tensor, int], Tensor]) -> None:
    images = torch.tensor([5, 2**40 + 7, 0, 5, 123_456_789])
    whole = draw(images, 40)
    assert torch.equal(whole, torch.cat([draw(image[None], 40) for image in images]))
    assert torch.equal(whole[[4, 1]], draw(images[[4, 1]], 40))
    for count in (1, 2, 3, 5, 39):
        assert draw(images, count).shape == (5, count)
        assert torch.equal(whole[:, :count], draw(images, count))


def test_draws_of_several_streams_are_those_of_each() -> None:
    images, words, normals = torch.tensor([0, 7, 2**40]), {4: 10, 0: 2, 5: 1, 2**32 - 1: 6}, {1: 7, 3: 2}
    together = Draws(3, images, words, normals)
    for stream, count in words.items():
        assert torch.equal(together.bits(stream), bits(3, stream, images, count))
        assert torch.equal(together.uniform(stream), uniform(3, stream, images, count))
        assert torch.equal(together.integers(stream, 1000), integers(3, stream, images, 1000))
        assert torch.equal(together.coins(stream), integers(3, stream, images, 2).bool())
    for stream, count in normals.items():
        assert torch.equal(together.normal(stream), keyed.normal(3, stream, images, count))
    with pytest.raises(ValueError, match="stream = -1"):
        Draws(3, images, {0: 1, -1: 1})


def test_torch_generator_is_neither_read_nor_moved() -> None:
    before = torch.get_rng_state()
    first = [draw(torch.arange(4), 9) for draw in DRAWS.values()]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert all(torch.equal(a, draw(torch.arange(4), 9)) for a, draw in zip(first, DRAWS.values(), strict=True))


def test_uniform_is_uniform_and_normal_is_normal() -> None:
    draws = uniform(0, Stream.LABEL_DROP, torch.arange(1000), 200)
    assert draws.dtype == torch.float32
    assert stats.kstest(draws.flatten().numpy(), "uniform").pvalue > 0.01
    draws = keyed.normal(0, Stream.NOISE, torch.arange(1000), 200)
    assert draws.dtype == torch.float32
    assert abs(draws.var() - 1) < 4 * math.sqrt(2 / draws.numel())
    for part in (
        draws[:, 0::2],
        draws[:, 1::2],
        draws[0::2],
        draws[:, :1],
        draws,
    ):  # sines, cosines, some images, one pixel
        assert stats.kstest(part.flatten().numpy(), "norm").pvalue > 0.01


@pytest.mark.parametrize("power", [1, 2])
def test_normal_neighbours_images_streams_and_seeds_are_uncorrelated(power: int) -> None:
    images = torch.arange(500)
    noise = keyed.normal(0, Stream.NOISE, images, 200) ** power
    pairs = {
        "the two of a Box-Muller pair": (noise[:, 0::2], noise[:, 1::2]),
        "pairs": (noise[:, :-2], noise[:, 2:]),
        "images": (noise[:-1], noise[1:]),
        "streams": (noise, keyed.normal(0, Stream.NOISE + 1, images, 200) ** power),
        "seeds": (noise, keyed.normal(1, Stream.NOISE, images, 200) ** power),
        "2^32 images later": (noise, keyed.normal(0, Stream.NOISE, images + 2**32, 200) ** power),
    }
    assert_uncorrelated(pairs)


@pytest.mark.parametrize("word", [0, 1, MASK - 1, MASK])
def test_extreme_words_stay_below_1_and_finite(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.arange(3)
    monkeypatch.setattr(keyed, "_philox", lambda *_: [torch.full((3, 1), word)] * 4)
    drawn = uniform(0, 0, images, 2)
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    assert keyed.normal(0, 0, images, 4).isfinite().all()
    for high in (1, 1000, 2**31):
        index = integers(0, 0, images, high)
        assert index.min() >= 0 and index.max() < high


def test_integers_cover_every_value_evenly() -> None:
    counts = torch.bincount(integers(0, Stream.TIMESTEP, torch.arange(100_000), 1000), minlength=1000)
    assert counts.shape == (1000,) and stats.chisquare(counts.numpy()).pvalue > 0.01


@pytest.mark.parametrize("drop", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_keep_mask_drops_at_its_rate_in_every_layer_image_and_element(drop: float) -> None:
    masks = torch.stack([keyed.keep_mask(0, Stream.DROPOUT + i, torch.arange(32), 4096, drop) for i in range(8)])
    dropped = (~masks).double()  # (layer, image, element)
    variance = drop * (1 - drop)
    for half in (dropped[..., 0::2], dropped[..., 1::2]):
        assert abs(half.mean() - drop) < 4 * math.sqrt(variance / half.numel()) + 2**-17
    for others in ((0, 1), (0, 2), (1, 2)):
        rates = dropped.mean(others)
        # Rates scatter as those of independent draws do: neither too much nor, as in a sequence, too little.
        dispersion = (rates - drop).square().mean() * (dropped.numel() / rates.numel()) / variance
        assert abs(dispersion - 1.0) < 4 * math.sqrt(2 / rates.numel())


def test_keep_mask_is_independent_between_elements_images_layers_and_seeds() -> None:
    images = torch.arange(64)
    mask = keyed.keep_mask(0, Stream.DROPOUT, images, 8192, 0.5)
    pairs = {
        f"elements that are {apart} away": (mask[:, :-apart], mask[:, apart:]) for apart in (2, 32, 1024)
    }  # as words, rows of an image 32 wide, and its channels
    pairs |= {"halves of a word": (mask[:, 0::2], mask[:, 1::2]), "images": (mask[:-1], mask[1:])}
    pairs["layers"] = mask, keyed.keep_mask(0, Stream.DROPOUT + 1, images, 8192, 0.5)
    pairs["seeds"] = mask, keyed.keep_mask(1, Stream.DROPOUT, images, 8192, 0.5)
    assert_uncorrelated(pairs)


def test_streams_that_are_counted_on_from_meet_no_other() -> None:
    most_layers, most_timesteps = 10_000, 100_000
    above = [Stream.ROUNDING, Stream.MULTIRES, Stream.MULTIRES_RATIO, Stream.NOISE_OFFSET]
    assert sorted(Stream)[-7:] == [Stream.DROPOUT, *above, Stream.HELD_OUT, Stream.SAMPLE]
    assert Stream.DROPOUT + most_layers < Stream.ROUNDING and Stream.HELD_OUT + most_timesteps < Stream.SAMPLE
    assert Stream.SAMPLE + 1 + most_timesteps < 2**32
    assert len(set(Stream)) == len(Stream.__members__)


@pytest.mark.parametrize(
    "call",
    [
        lambda: bits(-1, 0, torch.arange(1), 1),
        lambda: bits(0, 2**32, torch.arange(1), 1),
        lambda: integers(0, 0, torch.arange(1), 2**31 + 1),
        lambda: keyed.keep_mask(0, 0, torch.arange(1), 1, 1.0),
        lambda: keyed.keep_mask(0, 0, torch.arange(1), 1, -0.1),
    ],
)
def test_values_out_of_range_are_refused(call: Callable[[], Tensor]) -> None:
    with pytest.raises(ValueError, match="must be"):
        call()


def test_no_draw_reads_back_from_the_device() -> None:
    # A tensor on the meta device has no values: anything that waits for one raises.
    images = torch.arange(4, device="meta")
    for draw in DRAWS.values():
        assert draw(images, 9).shape == (4, 9)


@pytest.mark.gpu
def test_draws_on_cuda_are_those_of_the_cpu() -> None:
    images = torch.tensor([0, 5, 2**40 + 7])
    for name, draw in DRAWS.items():
        # a magnitude up to 6.8 times an angle up to 2 pi, each rounded by a unit of the last place on either device
        tolerance = 2 * 6.8 * 2 * math.pi * 2.0**-23 if name == "normal" else 0.0
        torch.testing.assert_close(draw(images.cuda(), 1001).cpu(), draw(images, 1001), rtol=tolerance, atol=tolerance)


def test_keys_of_draws_stay_where_a_cuda_graph_reads_them() -> None:
    """However many sizes of images there are: buckets of aspect may be 41, and each has a graph of its own."""
    for made in (keyed._columns, keyed._codes):
        kept = [made(((0, (range(4),)), (1, (range(blocks),))), torch.device("cpu")) for blocks in range(1, 101)]
        assert all(
            made(((0, (range(4),)), (1, (range(blocks),))), torch.device("cpu")) is kept[blocks - 1]
            for blocks in range(1, 101)
        )


def test_ranges_of_normal_draws_are_those_of_all_draws_and_no_others_are_made() -> None:
    images = torch.tensor([3, 2**33])
    everything = keyed.Draws(5, images, {7: 3}, {1: 96}).normal(1)
    draws = keyed.Draws(5, images, {7: 3}, {1: [range(8, 20), range(56, 68)], 3: 5})
    assert torch.equal(draws.normal(1), torch.cat((everything[:, 8:20], everything[:, 56:68]), dim=1))
    assert torch.equal(draws.normal(3), keyed.normal(5, 3, images, 5))
    assert draws._bits.shape == (2, 4 * (1 + 3 + 3 + 2))
