// The one kernel. What it does is in pack.cuh; what launches it is rust/kvxfer-cuda/src/kernels.rs.
#include "pack.cuh"

// As many threads a block as `THREADS` there, a multiple of a warp.
extern "C" __global__ void __launch_bounds__(256)
    kvxfer_copy_stripes(const kvxfer::Stripe* stripes, const kvxfer::u64* first, kvxfer::u64 count) {
    kvxfer::Memory memory;
    const kvxfer::u64 block = blockDim.x;
    kvxfer::copy_stripes(stripes, first, count, blockIdx.x * block + threadIdx.x, gridDim.x * block, memory);
}
