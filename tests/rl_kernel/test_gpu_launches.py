"""What GPU launches take for granted and no error would report, checked without a GPU: room, places, who is there."""

import itertools

import pytest

pytest.importorskip("triton")

import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops import cluster_matmul, gluon_matmul
from rl_kernel.ops.attention import gluon_decode
from rl_kernel.ops.gluon_join import _Arena
from rl_kernel.ops.tree_all_reduce import symmetric
from rl_kernel.ops.tree_all_reduce.triton_kernel import check_ranks

SHARED_MEMORY, REGISTERS = 227 * 1024, 65536
ROWS = (17, 33, 64, 65, 128, 129, 256, 384, 2048, 8192)
COLUMNS = (64, 1000, 4096, 6144, 24576, 151936)


@pytest.mark.parametrize("processors", [78, 114, 132])
@pytest.mark.parametrize("segments", cluster_matmul.SEGMENTS)
def test_programs_share_a_tile_where_tiles_are_too_few_and_fit_into_a_multiprocessor(
    segments: int, processors: int
) -> None:
    cases = itertools.product(ROWS, COLUMNS, (True, False))
    shapes = [cluster_matmul.shape_for(m, n, segments, processors, rows_of_b) for m, n, rows_of_b in cases]
    assert None in shapes  # many tiles are left to the other kernel
    shared = [shape for shape in shapes if shape is not None]
    assert {shape.split for shape in shared} >= {1, 2}
    for shape in shared:
        assert shape.split in (1, 2, 4, 8)
        assert segments % shape.split == 0
        assert shape.stages >= 5
        assert shape.shared <= SHARED_MEMORY
        assert shape.bn // shape.split >= 8  # whole blocks of eight columns, as a thread has them


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_programs_that_share_a_partial_of_keys_are_on_the_device_together(processors: int) -> None:
    for dim, groups in itertools.product(gluon_decode.HEAD_DIMS, range(1, 200)):
        members = gluon_decode.members_for(dim, groups, processors)
        assert members == 1 or (members * groups <= processors and dim // members >= 16), (dim, groups)
    assert gluon_decode.members_for(128, 8, processors) == 8  # one sequence of up to 1024 keys, 8 kv heads


def test_copies_under_way_and_the_waiting_level_of_the_tree_fit_into_shared_memory() -> None:
    for m in ROWS:
        shape = gluon_matmul.shape_for(m)
        copies = shape.stages * (shape.bm + shape.bn) * gluon_matmul.BK * 2
        assert copies + shape.bm * shape.bn * 4 + 1024 <= SHARED_MEMORY, (m, shape)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_regions_of_the_memory_that_ranks_share_lie_one_after_another(ranks: int) -> None:
    layout = symmetric.Layout(ranks, programs=264)
    words = 2 * ranks * layout.capacity * 8
    slots = 264 * 4 * ranks * layout.block * 4
    assert (layout.sums, layout.results, layout.flags) == (words, words + slots, words + 2 * slots)
    assert layout.whole == words + slots // 2
    assert layout.size == layout.flags + symmetric.FINER * 264 * ranks * 4
    assert all(start % 16 == 0 for start in (layout.sums, layout.results, layout.flags))
    assert layout.capacity % symmetric.ONE_SHOT_BLOCK == 0
    assert layout.block * ranks == 2 * symmetric.BLOCK


@pytest.mark.parametrize("finer", [1, symmetric.FINER])
def test_all_programs_of_an_all_reduce_are_on_the_device_together(finer: int) -> None:
    threads = finer * symmetric.PROGRAMS_PER_PROCESSOR * symmetric.WARPS * 32
    assert threads * symmetric._registers(finer) <= REGISTERS
    assert threads <= 2048
    # One shot has no turns, but its programs wait as well: on 78 multiprocessors, the fewest of a Hopper device.
    per_processor = -(-symmetric.ONE_SHOT // symmetric.ONE_SHOT_BLOCK // 78)
    assert per_processor * symmetric.ONE_SHOT_WARPS * 32 <= 2048
    assert per_processor <= 32


def test_no_two_launches_get_the_same_counters_and_there_is_an_end_of_them() -> None:
    arena = _Arena(torch.arange(100, dtype=torch.int32))
    shares = [arena.share(30) for _ in range(4)]
    assert shares[3] is None
    given = torch.cat([s for s in shares if s is not None])
    assert given.tolist() == list(range(90))
    last = arena.share(10)
    assert last is not None
    assert last.tolist() == list(range(90, 100))
    assert arena.share(1) is None


def test_a_number_of_ranks_without_a_balanced_tree_is_refused() -> None:
    for ranks in (1, 2, 4, 64):
        check_ranks(ranks)
    with pytest.raises(ShapeError, match=r"3 ranks; a balanced tree has a power of two up to 64, .* below is 2"):
        check_ranks(3)
    with pytest.raises(ShapeError, match=r"128 ranks; .* below is 64"):
        check_ranks(128)
