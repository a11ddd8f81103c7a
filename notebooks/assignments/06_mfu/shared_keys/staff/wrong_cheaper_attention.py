"""Wrong: attention is charged by key-value heads, as if the query heads of a group shared their scores."""


def visible_pairs(sequence_len, window, sinks):
    total = 0
    for i in range(sequence_len):
        first = max(0, i - window)  # the oldest key inside the window
        total += i - first + 1 + min(sinks, first)
    return total


def training_flops(model, sequence_len):
    multiply_adds = model.n_embd * model.vocab_size * sequence_len
    for layer in model.layers:
        weights = 2 * model.n_embd * model.n_head * model.head_dim + 2 * model.n_embd * model.hidden
        if layer.keys_from is None:
            weights += 2 * model.n_embd * layer.n_kv_head * model.head_dim
        pairs = visible_pairs(sequence_len, layer.window, layer.sinks)
        multiply_adds += weights * sequence_len + 2 * layer.n_kv_head * model.head_dim * pairs
    return 6 * multiply_adds
