"""What a captured graph may hold is a closed list: names that no strict op launches are found."""

import pytest

from rl_kernel.integrations.opaque.known_kernels import foreign_kernels, strict_kernels


def test_the_kernels_of_the_ops_are_known_by_their_own_names():
    from rl_kernel.integrations.vllm import cache_write
    from rl_kernel.ops import cluster_matmul, gluon_matmul, triton_matmul
    from rl_kernel.ops.attention import gluon_kernel, triton_kernel

    assert all((cluster_matmul, gluon_matmul, triton_matmul, gluon_kernel, triton_kernel, cache_write))
    known = strict_kernels()
    attention = {"attention_kernel", "decode_kernel", "merge_kernel"}
    assert attention | {"gemm_kernel", "gemm_tree_kernel", "gemm_cluster_kernel", "cache_write_kernel"} <= known
    assert foreign_kernels(["attention_kernel", "gemm_cluster_kernel", "cache_write_kernel"]) == []


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "_ZN7cutlass7Kernel2I66cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align8EEvNT_6ParamsE",
        "_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_23direct_copy_kernel_cudaERNS_18TensorIteratorBaseE",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "triton_poi_fused__to_copy_bitwise_or_embedding_ge_lt_masked_fill_sub_0",
        "triton_poi_fused__to_copy_bitwise_or_ge_lt_masked_fill_sub_tree_all_reduce_unsqueeze_1",
    ],
)
def test_a_product_of_cublaslt_a_copy_and_a_shards_masking_may_be_there(name):
    assert foreign_kernels([name]) == []


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_gemm_mul_silu_slice_0",
        "triton_red_fused_add_mean_mul_pow_rsqrt_0",
        "triton_poi_fused__to_copy_embedding_mul_0",
        "_ZN8cublasLt19splitKreduce_kernelILi32ELi16EifffLb0EfffLb1ELb1ELb0EEEvNS_18cublasSplitKParamsIT4_EE",
        "nvjet_tst_64x8_64x16_1x4_h_bz_splitK_TNT",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "flash_fwd_splitkv_kernel",
        "_ZN4vllm15rms_norm_kernelIN3c108BFloat16ELi8ELi2EEEvPT_PKS3_llllllS6_fii",
    ],
)
def test_any_other_kernel_is_foreign(name):
    assert foreign_kernels(["attention_kernel", name]) == [name]
