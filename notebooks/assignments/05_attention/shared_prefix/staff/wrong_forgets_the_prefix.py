"""Documents see only themselves: the shared prefix is nobody's."""

import torch
import torch.nn.functional as F


def owners(prefix, lengths):
    lengths = torch.tensor(list(lengths), dtype=torch.long)
    return torch.cat([torch.full((prefix,), -1), torch.repeat_interleave(torch.arange(len(lengths)), lengths)])


def shared_prefix_mask(prefix, lengths):
    owner = owners(prefix, lengths)
    T = owner.numel()
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    return causal & (owner[:, None] == owner[None, :])


def route(prefix, lengths):
    if len(lengths) <= 1:
        return "causal"
    T = prefix + sum(lengths)
    apart = prefix * prefix + sum(n * (prefix + n) for n in lengths)
    return "split" if 2 * apart <= T * T else "masked"


def sdpa(q, k, v, **how):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.size(1) != k.size(1), **how).transpose(1, 2)


def attend(q, k, v, prefix, lengths):
    way = route(prefix, lengths)
    if way == "causal":
        return sdpa(q, k, v, is_causal=True)
    if way == "masked":
        return sdpa(q, k, v, attn_mask=shared_prefix_mask(prefix, lengths))
    parts = [sdpa(q[:, :prefix], k[:, :prefix], v[:, :prefix], is_causal=True)] if prefix else []
    start = prefix
    for n in lengths:
        end = start + n
        keys, values = (t[:, start:end] for t in (k, v))
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        parts.append(sdpa(q[:, start:end], keys, values, attn_mask=mask))
        start = end
    return torch.cat(parts, dim=1)
