"""The model: attention, loss, the GPT itself, and how it gets its weights."""
