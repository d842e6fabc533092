"""Import-only stand-in for the CPU build of sgl-kernel (not on PyPI).

With SGLANG_USE_CPU_ENGINE=1, sglang 0.5.17..0.5.23 import these nine functions and look up these
four torch ops unconditionally at import time.  None of them is *called* when a Qwen2.5-VL is
served without speculative decoding: each raises if it ever is.  Because no operator
`convert_weight_packed` exists under torch.ops.sgl_kernel, cpu_has_amx_support() is False and every
layer takes SGLang's own torch path.
"""
import torch


def _missing(name):
    def fn(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel stand-in: {name} is not here; it needs the real package")
    return fn


for _n in (
    "assign_req_to_token_pool_cpu",             # srt/mem_cache/allocation.py:46
    "copy_all_layer_kv_cache_cpu",              # kernels/ops/kvcache/cache_move.py:10
    "assign_draft_cache_locs_contiguous_cpu",   # kernels/ops/speculative/cache_locs.py:29
    "assign_extend_cache_locs_cpu",             # kernels/ops/speculative/cache_locs.py:30
    "fill_accept_out_cache_loc_cpu",            # kernels/ops/speculative/eagle.py:10
    "fill_bonus_tokens_cpu",                    # kernels/ops/speculative/eagle.py:10
    "build_tree_kernel_efficient_cpu",          # kernels/ops/speculative/spec_tree.py:41
    "verify_tree_greedy_cpu",                   # kernels/ops/speculative/spec_tree.py:43
    "rotate_input_ids_cpu",                     # kernels/ops/speculative/multi_layer_eagle.py:25
):
    globals()[_n] = _missing(_n)

_lib = torch.library.Library("sgl_kernel", "FRAGMENT")   # keep a reference
for _n in (                                              # srt/models/qwen3_5.py:284-298
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _lib.define(_n + "() -> ()")
