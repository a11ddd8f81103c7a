"""From text to batches: sources, token shards, packing, loading, prefetching."""
