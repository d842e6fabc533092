"""The operators that vLLM's CPU platform takes from its compiled kernels, for a decoder and a vision encoder.

For tests only: slow and right. vLLM imports this in place of its library; importing it registers the operators.
"""

import math
import torch

_lib = torch.library.Library("_C", "FRAGMENT")


def _op(schema, fn):
    _lib.define(schema)
    _lib.impl(schema.split("(")[0], fn, "CompositeExplicitAutograd")


def _init_cpu_memory_env(nodes):
    return None


def _slot_mapping(query_start_loc, positions, block_table, slot_mapping, block_size):
    n = query_start_loc.numel() - 1
    qsl = query_start_loc.tolist()
    for i in range(n):
        s, e = qsl[i], qsl[i + 1]
        if e > s:
            pos = positions[s:e].to(torch.int64)
            blk = block_table[i].to(torch.int64)[pos // block_size]
            slot_mapping[s:e] = (blk * block_size + pos % block_size).to(slot_mapping.dtype)


def _sched_meta(num_reqs, num_heads, num_kv_heads, head_dim, seq_lens, dtype, query_start_loc, causal,
                window, isa, enable_kv_split, dynamic_causal=None, kv_cache_dtype="auto"):
    return torch.zeros(1, dtype=torch.int32)


def _reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa, k_scale=1.0, v_scale=1.0,
                       kv_cache_dtype="auto"):
    # caches: [num_blocks, num_kv_heads, block_size, head]
    bs = key_cache.size(2)
    n = min(slot_mapping.numel(), key.size(0))
    slots = slot_mapping[:n].to(torch.int64)
    keep = slots >= 0
    slots = slots[keep]
    b, o = slots // bs, slots % bs
    key_cache[b, :, o] = key[:n][keep].to(key_cache.dtype)
    value_cache[b, :, o] = value[:n][keep].to(value_cache.dtype)


def _attention(query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi_slopes,
               sliding_window, block_table, softcap, scheduler_metadata, s_aux=None, dynamic_causal=None,
               k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"):
    if alibi_slopes is not None or s_aux is not None or dynamic_causal is not None or softcap:
        raise RuntimeError("alibi, sinks, dynamic causality and soft caps are not among the test kernels")
    bs, hkv = key_cache.size(2), key_cache.size(1)
    qsl, lens = query_start_loc.tolist(), seq_lens.tolist()
    for i in range(len(qsl) - 1):
        s, e, L = qsl[i], qsl[i + 1], lens[i]
        if e <= s:
            continue
        blk = block_table[i, : (L + bs - 1) // bs].to(torch.int64)
        k = key_cache[blk].permute(1, 0, 2, 3).reshape(hkv, -1, key_cache.size(3))[:, :L].float()
        v = value_cache[blk].permute(1, 0, 2, 3).reshape(hkv, -1, value_cache.size(3))[:, :L].float()
        q = query[s:e].transpose(0, 1).float()
        g = q.size(0) // hkv
        k, v = k.repeat_interleave(g, 0), v.repeat_interleave(g, 0)
        w = torch.matmul(q, k.transpose(1, 2)) * scale
        if causal:
            qpos = torch.arange(L - (e - s), L)[:, None]
            kpos = torch.arange(L)[None]
            m = kpos > qpos
            if sliding_window is not None and sliding_window > 0:
                m |= kpos <= qpos - sliding_window
            w = w.masked_fill(m, -math.inf)
        o = torch.matmul(w.softmax(-1), v).transpose(0, 1)
        output[s:e] = o.reshape(output[s:e].shape).to(output.dtype)


def _act(f):
    def run(out, x):
        d = x.size(-1) // 2
        out.copy_(f(x[..., :d]) * x[..., d:])
    return run


def _unary(f):
    return lambda out, x: out.copy_(f(x)) and None


_op("init_cpu_memory_env(SymInt[] nodes) -> ()", _init_cpu_memory_env)
_op("compute_slot_mapping_kernel_impl(Tensor qsl, Tensor pos, Tensor bt, Tensor(a!) sm, SymInt bs) -> ()",
    _slot_mapping)
_op("get_scheduler_metadata(SymInt num_reqs, SymInt nh, SymInt nkv, SymInt hd, Tensor seq_lens, ScalarType dtype, "
    "Tensor qsl, bool causal, SymInt window, str isa, bool split, Tensor? dyn=None, str kvd='auto') -> Tensor",
    _sched_meta)
_op("cpu_attn_reshape_and_cache(Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!) vc, Tensor sm, str isa, "
    "float ks=1.0, float vs=1.0, str kvd='auto') -> ()", _reshape_and_cache)
_op("cpu_attention_with_kv_cache(Tensor q, Tensor kc, Tensor vc, Tensor(a!) out, Tensor qsl, Tensor seq_lens, "
    "float scale, bool causal, Tensor? alibi, SymInt window, Tensor bt, float softcap, Tensor meta, Tensor? s_aux=None, "
    "Tensor? dyn=None, float ks=1.0, float vs=1.0, str kvd='auto') -> ()", _attention)
F = torch.nn.functional
_op("silu_and_mul(Tensor(a!) out, Tensor x) -> ()", _act(F.silu))
_op("gelu_and_mul(Tensor(a!) out, Tensor x) -> ()", _act(F.gelu))
_op("gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()", _act(lambda t: F.gelu(t, approximate="tanh")))


def _quick(out, x):
    out.copy_(x * torch.sigmoid(1.702 * x))


_op("gelu_quick(Tensor(a!) out, Tensor x) -> ()", _quick)
_op("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(dim=-1))


def _gumbel(logits, seeds):
    rows = []
    for i in range(logits.size(0)):
        g = torch.Generator().manual_seed(int(seeds[i]))
        e = torch.empty_like(logits[i]).exponential_(generator=g)
        rows.append((logits[i].softmax(-1) / e).argmax())
    return torch.stack(rows)


_op("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", _gumbel)
