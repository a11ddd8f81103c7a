# Source this before a run on NVIDIA devices: `. exec/env/nvidia.sh`. What is set already is left as it is.

# Compiled kernels outlive the job, so that a resumed run doesn't compile again. Torch's default lies under the
# temporary folder, which many machines empty. (torch.compile's documentation, caching.)
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/torchinductor}"

# NCCL says what goes wrong, and nothing else. (NCCL's user guide, environment variables.)
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# Not set, on purpose:
# - OMP_NUM_THREADS: `nanolearn run` gives each worker its share of the cores. Plain torchrun would give it one thread.
# - PYTORCH_ALLOC_CONF=expandable_segments:True: helps where sizes change from step to step. Here every step asks for
#   the same blocks. Not measured.
# - NCCL_ALGO, NCCL_PROTO and other tuning: NCCL's guide keeps them for debugging; they may slow or hang a run.
# - TORCH_NCCL_ASYNC_ERROR_HANDLING: what a worker does when a collective fails or times out (0 nothing, 1 and 3 end
#   the process; torch's ProcessGroupNCCL.hpp). Left at torch's default, which was not verified; 0 would let a run hang.
# - NCCL_SOCKET_IFNAME: needed on several nodes where NCCL picks a network that the other node can't reach; then name
#   the right one, such as NCCL_SOCKET_IFNAME=eth0.
# - CUDA_VISIBLE_DEVICES: all devices of the first kind are used; set it to leave some out.
