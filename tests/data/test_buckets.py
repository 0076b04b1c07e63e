"""Buckets of aspect: their sizes, the bucket of an image, and the order of training."""

import numpy as np
import pytest

from ddpm_ds.data.buckets import AREAS, bucket_of, bucket_sizes, cropped
from ddpm_ds.data.order import BucketOrder

ORDER = BucketOrder(counts=(37, 100, 16), seed=3, group=8)


@pytest.mark.parametrize(("size", "step"), [((1024, 1024), 64), ((512, 512), 64), ((768, 512), 8)])
def test_sizes_have_about_the_pixels_that_were_asked_for(size: tuple[int, int], step: int) -> None:
    sizes = bucket_sizes(size, step, 2.0)
    assert size in sizes
    for height, width in sizes:
        assert height % step == width % step == 0
        assert max(height, width) <= 2 * min(height, width)
        assert abs(height * width / (size[0] * size[1]) - 1) <= AREAS
    assert len({height for height, _ in sizes}) == len(sizes)


def test_an_image_is_in_the_bucket_that_crops_it_least() -> None:
    sizes = bucket_sizes((1024, 1024), 64, 2.0)
    for image in ((600, 800), (800, 600), (333, 999), (5, 5)):
        lost = [cropped(image, size) for size in sizes]
        assert lost[bucket_of(image, sizes)] == min(lost)
    assert cropped((600, 800), (300, 400)) == 0.0
    assert cropped((100, 100), (100, 50)) == cropped((100, 100), (50, 100)) == 0.5


def test_each_image_comes_once_in_each_pass_of_its_bucket() -> None:
    seen: dict[int, list[int]] = {bucket: [] for bucket in range(len(ORDER.counts))}
    for group in range(400):
        bucket, positions = ORDER.images_at(np.arange(8 * group, 8 * group + 8))
        seen[bucket] += positions.tolist()
    for bucket, count in enumerate(ORDER.counts):
        passes = [seen[bucket][first : first + count] for first in range(0, len(seen[bucket]), count)]
        assert all(sorted(one) == list(range(count)) for one in passes if len(one) == count)
        share, groups = count / sum(ORDER.counts), len(seen[bucket]) / 8
        assert abs(groups - 400 * share) <= 1 + count / 8, "a bucket is seen as often as it has images"


def test_the_order_is_a_function_of_the_image_index() -> None:
    whole = [ORDER.images_at(np.arange(8 * group, 8 * group + 8)) for group in range(60)]
    for group in reversed(range(60)):
        bucket, positions = ORDER.images_at(np.arange(8 * group + 4, 8 * group + 8))
        assert bucket == whole[group][0] == ORDER.bucket_at(8 * group + 7)
        assert positions.tolist() == whole[group][1][4:].tolist()
    other = BucketOrder(ORDER.counts, seed=4, group=8)
    assert [other.bucket_at(8 * group) for group in range(60)] != [bucket for bucket, _ in whole]
