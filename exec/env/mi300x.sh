# Source this before a run on MI300X: `. exec/env/mi300x.sh`. What is set already is left as it is. ROCm reads some
# names that say CUDA or NCCL: RCCL takes NCCL's variables.

# Compiled kernels outlive the job; compiling again costs minutes.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/torchinductor}"

# RCCL says what goes wrong, and nothing else.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# Not set, on purpose:
# - OMP_NUM_THREADS: `nanolearn run` gives each worker its share of the cores.
# - HSA_OVERRIDE_GFX_VERSION: makes ROCm take one chip for another. A real gfx942 needs no disguise; the published
#   one-card run set it without need. `nanolearn doctor` prints the architecture.
# - PYTORCH_ALLOC_CONF (or PYTORCH_HIP_ALLOC_CONF) =expandable_segments:True: did nothing on the ROCm builds of the
#   published run (torch 2.9, ROCm 6.4); on a later one a copy to the device is reported to hang for ever
#   (pytorch/pytorch issue 192259, open in August 2026: torch 2.12 with ROCm 7.14, on a gfx1201, not on this card).
# - TORCH_NCCL_ASYNC_ERROR_HANDLING: what a worker does when a collective fails or times out (0 nothing, 1 and 3 end
#   the process; torch's ProcessGroupNCCL.hpp). Left at torch's default, which was not verified; 0 would let a run hang.
# - HIP_FORCE_DEV_KERNARG=1, GPU_MAX_HW_QUEUES=2, NCCL_MIN_NCHANNELS=112: found in tuning guides for this card. Not
#   verified, not measured: try them one at a time, and look at tokens a second.
# - HIP_VISIBLE_DEVICES: all devices are used; set it to leave some out.
# - ROCBLAS_USE_HIPBLASLT, TORCH_BLAS_PREFER_HIPBLASLT: torch chooses by itself. Not verified.
